"""What is wrong with this host, this installation, this job's environment? Asked before anything runs."""

from meshcomm.doctor.examine import examine
from meshcomm.doctor.finding import Finding
from meshcomm.doctor.together import examine_together

__all__ = ["Finding", "examine", "examine_together"]

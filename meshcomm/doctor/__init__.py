"""Check this host, this installation and this job's environment before the job starts."""

from meshcomm.doctor.examine import examine
from meshcomm.doctor.finding import Finding
from meshcomm.doctor.together import examine_together

__all__ = ["Finding", "examine", "examine_together"]

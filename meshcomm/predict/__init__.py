"""What a mesh costs before it is made: links, times, stages, memory, traffic of a step, findings, rankings. No torch, no process."""

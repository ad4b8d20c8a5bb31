"""What a step costs in floating-point operations and memory, and where metrics go beside metrics.jsonl."""

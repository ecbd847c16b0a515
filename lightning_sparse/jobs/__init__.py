"""A TRAINING AS A JOB, whatever its strategy: position in the data, newest checkpoint, signals, requeue, ``submit``."""

"""`ncz report`: what the records of a run (`statistics.jsonl`) say about it, in figures, a picture and words."""

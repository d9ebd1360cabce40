"""The table of the laboratory's commands, which `speculant.cli.main` finds by an entry point."""

COMMANDS = {  # with the first paragraph of each one's help, so that the list of commands imports none of them
    "check-lossless": "Check that speculation preserves the target's distribution, for a pair of models and a drafter.",
    "check-pair": "Measure whether a draft model or a head speeds up a target, and recommend flags.",
    "inflate": "Write a model of a larger shape that computes the same function.",
    "quantize": "Write a model whose weights are rounded to fewer bits.",
    "plan": "Compute the best draft length, its speed and its extra operations.",
    "bench": "Measure how fast a model is on this machine, plain and speculative in the same run.",
    "train": "Train small models: a target, a draft for a target, or a head.",
}

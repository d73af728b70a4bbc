"""The founding papers, reproduced: one command per study compares a paper's figures with ours.

This module imports nothing, so that the command line can list the studies at once.
"""

# For each study, the function that runs it: it takes a Workspace and returns a Study.
STUDIES = {
    "gradient-dropping": "papers.gradient_dropping.study:study",
    "topk-convergence": "papers.topk_convergence.study:study",
    "thresholds": "papers.tsai_thesis.thresholds:study",
    "request-scheduling": "papers.tsai_thesis.request_scheduling:study",
    "cat": "papers.cat.study:study",
    "sparsify-gradients": "papers.sparsify_gradients.study:study",
}
SCALES = ("small", "full")

__all__ = ["SCALES", "STUDIES"]

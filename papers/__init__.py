"""Reproduce: the papers' claims, run again by one command each, with the paper's figures next to ours.

This module loads no torch, so that commands can list the names at once.
"""

# Where each study is made: a function that takes a Workshop and returns a Study.
STUDIES = {
    "gradient-dropping": "papers.gradient_dropping.study:study",
    "topk-convergence": "papers.topk_convergence.study:study",
    "thresholds": "papers.thresholds.study:study",
    "request-scheduling": "papers.request_scheduling.study:study",
    "cat": "papers.cat.study:study",
    "sparsify-gradients": "papers.sparsify_gradients.study:study",
}

__all__ = ["STUDIES"]

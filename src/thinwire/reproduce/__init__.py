"""Reproduce: the papers' claims, run again by one command each, with the paper's figures next to ours.

This module loads no torch, so that commands can list the names at once.
"""

# Where each study is made: a function that takes a Workshop and returns a Study.
STUDIES = {
    "gradient-dropping": "thinwire.reproduce.gradient_dropping:study",
    "topk-convergence": "thinwire.reproduce.topk_convergence:study",
    "thresholds": "thinwire.reproduce.thresholds:study",
    "request-scheduling": "thinwire.reproduce.request_scheduling:study",
    "cat": "thinwire.reproduce.cat:study",
    "sparsify-gradients": "thinwire.reproduce.sparsify_gradients:study",
}

__all__ = ["STUDIES"]

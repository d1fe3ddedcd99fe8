"""Public names of `oases_svm`, classifiers with the exact hinge loss; see docs/svm.md. Needs no torch."""

import sys

import oases_svm
from oases_svm import NonconvexSVC, NonconvexSVCCV, Path, Penalty, plot_path, svc_path

__all__ = ["NonconvexSVC", "NonconvexSVCCV", "Path", "Penalty", "plot_path", "svc_path"]

# Estimators pickled by an earlier version refer to this module.
for _name in ("cross_validation", "estimator", "path", "penalties"):
    globals()[_name] = sys.modules[f"{__name__}.{_name}"] = getattr(oases_svm, _name)

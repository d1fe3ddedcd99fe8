"""Support vector machines with the exact hinge loss and nonconvex penalties; see docs/svm.md.

Requires numpy, scipy and scikit-learn; torch only for a process group, matplotlib only to plot a path.
"""

try:
    import sklearn  # noqa: F401
except ImportError as error:
    raise ImportError("oases.svm needs scikit-learn; install it with: pip install scikit-learn") from error

from oases_svm.cross_validation import NonconvexSVCCV
from oases_svm.estimator import NonconvexSVC
from oases_svm.path import Path, plot_path, svc_path
from oases_svm.penalties import Penalty

__all__ = ["NonconvexSVC", "NonconvexSVCCV", "Path", "Penalty", "plot_path", "svc_path"]

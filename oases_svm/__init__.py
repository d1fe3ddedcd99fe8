"""Support vector machines with the true hinge loss and penalties that do not shrink what they keep; see docs/svm.md.

Imports numpy, scipy and scikit-learn alone; torch where a process group is given, matplotlib where a path is drawn.
"""

try:
    import sklearn  # noqa: F401
except ImportError as error:
    raise ImportError("oases.svm needs scikit-learn; install it with: pip install 'oases[svm]'") from error

from oases_svm.cross_validation import NonconvexSVCCV
from oases_svm.estimator import NonconvexSVC
from oases_svm.path import Path, plot_path, svc_path
from oases_svm.penalties import Penalty

__all__ = ["NonconvexSVC", "NonconvexSVCCV", "Path", "Penalty", "plot_path", "svc_path"]

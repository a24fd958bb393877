"""Live views of an engine in the notebook.

Owns what is drawn in an output cell and what its buttons ask for. An engine is anything that satisfies
`Monitored`; nothing here knows how one works, and nothing here imports IPython.
"""

from .monitor import MonitorWidget
from .readings import Monitored

__all__ = ["MonitorWidget", "Monitored"]

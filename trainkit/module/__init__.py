"""What users subclass to describe a training: ``TrainModule``, ``DataModule``, their overridable hooks and hyper-parameters."""

from __future__ import annotations

from __future__ import annotations

import copy
from pathlib import Path

from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer

from trainkit.loggers import CSVLogger
from trainkit.loggers.dummy import DummyLogger


class Drawing(TinyModule):
    def on_train_start(self) -> None:
        self.logger.experiment.add_image("image", None).close()
        self.logger.watch(self, log="all")
        self.logger.log_image("image", None)
        self.logger.log_hyperparams({"a": 1}, {"score": 2})
        self.logger.log_metrics({"a": 1}, 0)


def test_a_module_that_logs_by_itself_in_a_fast_dev_run() -> None:
    trainer = make_trainer(fast_dev_run=True, logger=CSVLogger("runs"))
    trainer.fit(Drawing(), tiny_loader())
    assert [type(one) for one in trainer.loggers] == [DummyLogger]
    assert list(Path.cwd().iterdir()) == []
    assert make_trainer(fast_dev_run=True, logger=False).logger is None
    assert make_trainer(fast_dev_run=True, logger=[]).logger is None


def test_it_writes_nothing() -> None:
    logger = copy.deepcopy(DummyLogger())
    assert (logger.save_dir, logger.log_dir, logger.version) == (None, None, None)
    assert not hasattr(logger, "_own")
    logger.finalize("success")

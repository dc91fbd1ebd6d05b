"""The entry point of a project that is laid out like the popular template of Lightning and Hydra."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
from instantiate import instantiate
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from lightning_utilities.core.rank_zero import rank_prefixed_message
from omegaconf import DictConfig, OmegaConf


class RankedLogger(logging.LoggerAdapter):
    def __init__(self, name: str = __name__, rank_zero_only: bool = False, extra: Mapping[str, object] | None = None) -> None:
        super().__init__(logger=logging.getLogger(name), extra=extra)
        self.rank_zero_only = rank_zero_only

    def log(self, level: int, msg: str, rank: int | None = None, *args: Any, **kwargs: Any) -> None:
        if self.isEnabledFor(level):
            msg, kwargs = self.process(msg, kwargs)
            current_rank = getattr(rank_zero_only, "rank", None)
            if current_rank is None:
                raise RuntimeError("The `rank_zero_only.rank` needs to be set before use")
            msg = rank_prefixed_message(msg, current_rank)
            if (self.rank_zero_only and current_rank == 0) or not self.rank_zero_only or current_rank == rank:
                self.logger.log(level, msg, *args, **kwargs)


log = RankedLogger(__name__, rank_zero_only=True)


@rank_zero_only
def log_hyperparameters(objects: dict[str, Any]) -> None:
    hparams: dict[str, Any] = {}
    config = OmegaConf.to_container(objects["cfg"])
    model, trainer = objects["model"], objects["trainer"]
    if not trainer.logger:
        log.warning("Logger not found! Skipping hyperparameter logging...")
        return
    hparams["model"] = config["model"]
    hparams["model/params/total"] = sum(p.numel() for p in model.parameters())
    hparams["model/params/trainable"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    for key in ("data", "trainer", "callbacks", "task_name", "tags", "ckpt_path", "seed"):
        hparams[key] = config.get(key)
    for logger in trainer.loggers:
        logger.log_hyperparams(hparams)


def train(cfg: DictConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    if cfg.get("seed"):
        L.seed_everything(cfg.seed, workers=True)
    datamodule: LightningDataModule = instantiate(cfg.data)
    model: LightningModule = instantiate(cfg.model)
    callbacks: list[Callback] = [instantiate(one) for one in cfg.callbacks.values()]
    logger: list[Logger] = [instantiate(one) for one in cfg.logger.values()]
    trainer: Trainer = instantiate(cfg.trainer, callbacks=callbacks, logger=logger)
    objects = {"cfg": cfg, "datamodule": datamodule, "model": model, "trainer": trainer}
    if logger:
        log_hyperparameters(objects)
    if cfg.get("train"):
        trainer.fit(model=model, datamodule=datamodule, ckpt_path=cfg.get("ckpt_path"))
    train_metrics = trainer.callback_metrics
    if cfg.get("test"):
        ckpt_path = trainer.checkpoint_callback.best_model_path
        if ckpt_path == "":
            log.warning("Best ckpt not found! Using current weights for testing...")
            ckpt_path = None
        trainer.test(model=model, datamodule=datamodule, ckpt_path=ckpt_path)
        log.info(f"Best ckpt path: {ckpt_path}")
    return {**train_metrics, **trainer.callback_metrics}, objects


def main() -> None:
    cfg = OmegaConf.load(Path(__file__).parent / "configs" / "train.yaml")
    metrics, objects = train(cfg)
    metric_value = metrics[cfg.optimized_metric].item()
    best = os.path.exists(objects["trainer"].checkpoint_callback.best_model_path)
    found = {"losses": objects["model"].losses, "metrics": {name: value.item() for name, value in metrics.items()}}
    print(json.dumps({**found, "best": metric_value, "best_exists": best}))


if __name__ == "__main__":
    main()

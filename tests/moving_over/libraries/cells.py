"""Single cells with scvi-tools: train with early stopping and a checkpoint, save and load, resume, train on."""

import json
import warnings

import anndata
import numpy as np
import scvi
from lightning.pytorch.callbacks import Callback

warnings.filterwarnings("ignore")
scvi.settings.seed = 0
generator = np.random.default_rng(0)
cells = anndata.AnnData(generator.poisson(generator.gamma(2.0, 1.0, (200, 40))).astype(np.float32))
scvi.model.SCVI.setup_anndata(cells)


class Keep(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint("saved.ckpt")


quiet = {"accelerator": "cpu", "enable_progress_bar": False, "check_val_every_n_epoch": 1}

model = scvi.model.SCVI(cells, n_latent=4, n_hidden=16)
model.train(max_epochs=4, early_stopping=True, callbacks=[Keep()], **quiet)
latent = model.get_latent_representation()
model.save("model", save_anndata=False)
loaded = scvi.model.SCVI.load("model", adata=cells, accelerator="cpu")
assert np.allclose(loaded.get_latent_representation(), latent, atol=1e-6)

resumed = scvi.model.SCVI(cells, n_latent=4, n_hidden=16)
resumed.train(max_epochs=6, ckpt_path="saved.ckpt", **quiet)
loaded.train(max_epochs=2, **quiet)
steps = [one.trainer.global_step for one in (model, resumed, loaded)]
print(json.dumps({"steps": steps, "elbo": [float(one.get_elbo()) for one in (model, resumed, loaded)]}))

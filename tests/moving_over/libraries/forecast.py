"""Time series with darts: train with checkpoints, load the best, save and load, load weights, train on."""

import json
import os
import warnings

import numpy as np
from darts.models import TiDEModel
from darts.utils.timeseries_generation import linear_timeseries, sine_timeseries

warnings.filterwarnings("ignore")
series = (sine_timeseries(length=300, value_frequency=0.05) + linear_timeseries(length=300, end_value=1.0)).astype(np.float32)
train, val = series.split_before(0.7)


# darts puts objects into its checkpoints that cannot be stored without code, so trainkit omits them.
names = ["loss_fn", "torch_metrics_train", "torch_metrics_val"]
omitted = {"omit_from_checkpoint": names} if "TRAINKIT_AS" in os.environ else {}


def model(**more):
    return TiDEModel(
        input_chunk_length=24,
        output_chunk_length=6,
        hidden_size=16,
        n_epochs=3,
        random_state=0,
        model_name="tide",
        work_dir="runs",
        save_checkpoints=True,
        force_reset=True,
        pl_trainer_kwargs={"accelerator": "cpu", "enable_progress_bar": False, **omitted},
        **more,
    )


first = model()
first.fit(train, val_series=val, verbose=False)
forecast = first.predict(6, verbose=False).values()
best = TiDEModel.load_from_checkpoint("tide", work_dir="runs", best=True)
last = TiDEModel.load_from_checkpoint("tide", work_dir="runs", best=False)
assert np.array_equal(last.predict(6, series=train, verbose=False).values(), forecast)

first.save("tide.pt")
loaded = TiDEModel.load("tide.pt")
assert np.array_equal(loaded.predict(6, verbose=False).values(), forecast)

weights = TiDEModel(input_chunk_length=24, output_chunk_length=6, hidden_size=16, random_state=1)
weights.load_weights("tide.pt")
assert np.array_equal(weights.predict(6, series=train, verbose=False).values(), forecast)

last.fit(train, val_series=val, epochs=5, verbose=False)
first.fit(train, val_series=val, epochs=2, verbose=False)
print(json.dumps({"epochs": [last.epochs_trained, first.epochs_trained]}))

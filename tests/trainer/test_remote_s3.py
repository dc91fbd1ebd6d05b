"""A run on S3 (moto's server on this machine) is killed in the middle of an upload: the older checkpoint is used."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep

import boto3
import pytest
from helpers.patience import PATIENCE
from moto.server import ThreadedMotoServer

SCRIPT = """
import sys, time
import s3fs, torch
from helpers.resume.saving import Adam
from helpers.runs.tiny import tiny_loader
from helpers.runs.trainers import make_trainer, parameters_of
from trainkit.callbacks import ModelCheckpoint

steps, slow = int(sys.argv[1]), sys.argv[2] == "slow"
put_file = s3fs.S3FileSystem._put_file

async def slowly(self, *given, **options):
    if slow and "step-00000004" in given[1]:
        open("uploading", "a").write("x")
        time.sleep(0.3 if "manifest.json" in given[1] else 60)
    await put_file(self, *given, **options)

s3fs.S3FileSystem._put_file = slowly
trainer = make_trainer(
    ModelCheckpoint(every_n_train_steps=2), default_root_dir="s3://bucket/runs", enable_checkpointing=True,
    max_steps=steps, max_epochs=-1,
)
module = Adam()
trainer.fit(module, tiny_loader(16, shuffle=True), ckpt_path="auto")
print("weights", [value.tolist() for value in parameters_of(module).values()])
"""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """The address of an S3 server on this machine, with an empty bucket."""
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def environment(endpoint: str) -> dict[str, str]:
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    return {**os.environ, **keys, "AWS_ENDPOINT_URL": endpoint, "FSSPEC_S3_ENDPOINT_URL": endpoint}


def start(environment: dict[str, str], steps: int, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(steps), how]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def output_of(process: subprocess.Popen[str]) -> str:
    text, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, text
    return text


@pytest.mark.slow
def test_killed_in_the_middle_of_an_upload(environment: dict[str, str], endpoint: str) -> None:
    client = boto3.client(
        "s3", endpoint_url=endpoint, aws_access_key_id="test", aws_secret_access_key="test", region_name="us-east-1"
    )
    client.create_bucket(Bucket="bucket")

    def complete() -> set[str]:
        found = client.list_objects_v2(Bucket="bucket").get("Contents", [])
        return {entry["Key"].split("/")[-2] for entry in found if entry["Key"].endswith("manifest.sha256")}

    killed = start(environment, 4, "slow")
    deadline = monotonic() + PATIENCE
    while not Path("uploading").exists() or len(Path("uploading").read_text()) < 2:  # its manifest is there, and no more
        assert killed.poll() is None, killed.communicate()[0]
        assert monotonic() < deadline
        sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert complete() == {"step-00000002"}

    shutil.rmtree("trainkit_remote")  # another machine
    resumed = output_of(start(environment, 8, "fast"))
    assert "version_0/checkpoints/step-00000002 (step 2" in resumed
    assert complete() == {"step-00000006", "step-00000008"}

    for entry in client.list_objects_v2(Bucket="bucket")["Contents"]:
        client.delete_object(Bucket="bucket", Key=entry["Key"])
    shutil.rmtree("trainkit_remote")
    whole = output_of(start(environment, 8, "fast"))
    assert whole.splitlines()[-1] == resumed.splitlines()[-1]

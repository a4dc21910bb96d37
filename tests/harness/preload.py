"""What the process imports that others are forked from: all that an engine needs."""

# ruff: noqa: F401

import os

from tests.harness.engines import ENVIRONMENT

os.environ.update(ENVIRONMENT)  # some of it is read by imports

import vllm.model_executor.models.qwen2
import vllm.v1.engine.async_llm
import vllm.v1.engine.core
import vllm.v1.executor.uniproc_executor
import vllm.v1.worker.cpu_worker

import xinference_xavier.engine.spec

# SPDX-License-Identifier: Apache-2.0
"""Shared by tests, demo, benchmarks and soak: tiny checkpoints, media, real servers, real engines, and stand-ins.

models, media               checkpoints with random weights, and pictures, clips and sounds by number
servers                     Redis, S3, LMCache's server, vLLM's API server; a relay that fails on demand
engine_env, engine_runner   a vLLM engine on CPU, in the calling process or in a separate one that can be killed
engine_plugin               counts encodes inside an engine, refuses I/O there, and makes copies late or fail
core                        the cache without a serving engine: scheduler side and ranks over the real store process
stand_ins                   for vLLM's scheduler and runner, to drive the connector's two sides without vLLM

It imports nothing from `tests`.
"""

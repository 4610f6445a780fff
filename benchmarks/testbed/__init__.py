# SPDX-License-Identifier: Apache-2.0
"""What tests, demo, benchmarks and soak run on: tiny checkpoints, media, real servers, real engines, and stand-ins.

models, media               checkpoints with random weights, and pictures, clips and sounds by number
servers                     Redis, S3, LMCache's server, vLLM's API server; a relay that fails where it is to fail
engine_env, engine_runner   a vLLM engine on CPU, in the calling process or in one of its own that can be killed
engine_plugin               counts encodes inside an engine, refuses I/O there, and makes copies late or fail
core                        the cache without a serving engine: scheduler side and ranks over the real store process
stand_ins                   vLLM's scheduler and runner, to drive the connector's two sides without vLLM's

It imports nothing from `tests`.
"""

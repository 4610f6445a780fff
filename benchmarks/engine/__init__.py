# SPDX-License-Identifier: Apache-2.0
"""`make bench-engine`: latency that a user sees through vLLM's OpenAI server, with and without the cache."""

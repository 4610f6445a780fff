# SPDX-License-Identifier: Apache-2.0
"""`make bench-engine`: what a user waits for, through vLLM's OpenAI server, with and without the cache."""

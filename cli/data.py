"""`sop-data`: pack images into shards, check shards, see the views of them, write the demo set."""

from __future__ import annotations

import click

from sop_faiss.cli.common import CONTEXT_SETTINGS
from sop_faiss.cli.data_check import check_command
from sop_faiss.cli.data_demo import demo_command
from sop_faiss.cli.data_pack import pack_command
from sop_faiss.cli.data_preview import preview_command


@click.group(context_settings=CONTEXT_SETTINGS)
@click.version_option(package_name="sop-faiss")
def main() -> None:
    """Images in: pack them into shards, check shards, see what training makes of them, write a small demo set.

    \b
    Example:
      sop-data pack photos/ shards/ && sop-data check shards/
    """


main.add_command(pack_command)
main.add_command(check_command)
main.add_command(preview_command)
main.add_command(demo_command)


if __name__ == "__main__":
    main()

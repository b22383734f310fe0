"""What all tests in this folder may rely on."""

import os
import stat

import pytest
from hypothesis import settings

# How long an example takes is nothing that a test tells: processes share the cores.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture
def full_device(tmp_path_factory) -> str:
    """The path of a device like /dev/full. For root it is another one: code with a fault could replace it."""
    if os.getuid() != 0:
        return "/dev/full"
    device = tmp_path_factory.mktemp("devices") / "full"
    try:
        os.mknod(device, 0o666 | stat.S_IFCHR, os.stat("/dev/full").st_rdev)
        os.close(os.open(device, os.O_WRONLY))
    except OSError as error:
        pytest.skip(f"devices can't be made or opened here: {error}")
    return str(device)

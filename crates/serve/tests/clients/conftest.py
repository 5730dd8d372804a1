"""Where the server is: BASE_URL (http://127.0.0.1:8000), MODEL (s-moe: what is loaded), API_KEY (none)."""

import os

import pytest

BASE_URL = os.environ.get("BASE_URL", "http://127.0.0.1:8000").rstrip("/")
MODEL = os.environ.get("MODEL", "s-moe")
# The clients insist on one; a server without a key takes any.
API_KEY = os.environ.get("API_KEY", "any")


@pytest.fixture(scope="session")
def base_url():
    return BASE_URL


@pytest.fixture(scope="session")
def model():
    return MODEL


@pytest.fixture(scope="session")
def api_key():
    return API_KEY


@pytest.fixture(scope="session")
def asks_for_key():
    """Skips where any key will do."""
    if "API_KEY" not in os.environ:
        pytest.skip("the server takes any key: set API_KEY")

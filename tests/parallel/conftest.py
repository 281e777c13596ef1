import pytest
from partial_fc import comm
@pytest.fixture(scope="session")
def world():
    w = comm.init()
    yield w
    w.close()

import ctypes, functools, os
@functools.cache
def library():
    return ctypes.CDLL(os.environ.get("NAT", "/tmp/nat/rows.so"))
def why_not():
    return None

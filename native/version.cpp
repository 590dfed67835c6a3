// The version of the C interface, which src/polytempo/native/library.py compares with its own (ABI_VERSION there).
#include "polytempo.h"

extern "C" int32_t pt_abi_version(void) { return 10; }

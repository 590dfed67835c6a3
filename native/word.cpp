// A word by which processes hand memory to each other (src/polytempo/native/lending.py).
#include "polytempo.h"

// release: the setter's reads and writes of what it hands over are done. acquire: what follows comes after them.
void pt_word_set(uint32_t* word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
uint32_t pt_word_seen(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

// The C interface of codes_drawn.h, with the instruction set in use.
#include "codes_drawn_abi.h"

#include "codes_drawn.h"
#include "kernels.h"

namespace pt {
namespace {

const DrawnCodes& codes() { return *kernels_in_use().drawn; }

Fields of(const pt_fields& fields) { return {fields.width, fields.positions, fields.words}; }

} // namespace
} // namespace pt

using namespace pt;

extern "C" int64_t pt_qsgd_encode(
    const float* x, float* residual, int64_t count, int64_t bucket, int32_t levels, const pt_fields* fields, uint64_t key,
    void* wire) {
    return codes().qsgd_encode(x, residual, count, bucket, levels, of(*fields), key, wire);
}

extern "C" void pt_qsgd_decode(
    const void* wire, float* out, int64_t count, int64_t bucket, int32_t levels, const pt_fields* fields, int32_t add) {
    codes().qsgd_decode(wire, out, count, bucket, levels, of(*fields), add != 0);
}

extern "C" int64_t pt_terngrad_scaler(
    const float* x, const float* residual, int64_t count, double clip, float* scaler) {
    return codes().terngrad_scaler(x, residual, count, clip, scaler);
}

extern "C" void pt_terngrad_encode(
    const float* x, float* residual, int64_t count, float own, float scaler, const pt_fields* fields, uint64_t key,
    void* words) {
    codes().terngrad_encode(x, residual, count, own, scaler, of(*fields), key, words);
}

extern "C" void pt_terngrad_decode(
    const void* words, float* out, int64_t count, float scaler, int32_t terms, const pt_fields* fields, int32_t add) {
    codes().terngrad_decode(words, out, count, scaler, terms, of(*fields), add != 0);
}

extern "C" int64_t pt_natural_encode(const float* x, float* residual, int64_t count, uint64_t key, void* wire) {
    return codes().natural_encode(x, residual, count, key, wire);
}

extern "C" void pt_natural_decode(const void* wire, float* out, int64_t count, int32_t add) {
    codes().natural_decode(wire, out, count, add != 0);
}

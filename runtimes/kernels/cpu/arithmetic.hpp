// Token types and dot products on the CPU. Sums run in a fixed order whatever the instruction set: kLanes partial sums,
// added at the end as a tree, so that vectors can be used without fast-math.
#pragma once

#include "../common.hpp"

#include <cmath>
#include <cstring>
#include <new>

namespace algm::cpu {

struct Half {
    uint16_t bits;
};
struct Bfloat16 {
    uint16_t bits;
};

inline float float_from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float to_float(float value) { return value; }
inline float to_float(Bfloat16 value) { return float_from_bits(uint32_t{value.bits} << 16); }
inline float to_float(Half value) {
    const uint32_t magnitude = value.bits & 0x7fffu, sign = (uint32_t{value.bits} & 0x8000u) << 16;
    // Shifted into place the exponent is 112 too small; the product repairs it, for subnormals too.
    const float scaled = float_from_bits(magnitude << 13) * float_from_bits((127u + 112u) << 23);
    const uint32_t finite = bits_of(scaled), special = (magnitude << 13) | 0x7f800000u;
    return float_from_bits((magnitude >= 0x7c00u ? special : finite) | sign);
}

// Both round to nearest, ties to even.
template <class T>
T from_float(float value);
template <>
inline float from_float<float>(float value) {
    return value;
}
template <>
inline Bfloat16 from_float<Bfloat16>(float value) {
    const uint32_t bits = bits_of(value);
    if (std::isnan(value)) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
    return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
template <>
inline Half from_float<Half>(float value) {
    const uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
    if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // 65520 and above
    if (magnitude < 0x38800000u) {  // subnormal: the sum's last bits are the rounded multiple of 2^-24
        const float shifted = float_from_bits(magnitude) + 0.5f;
        return {static_cast<uint16_t>(sign | (bits_of(shifted) - bits_of(0.5f)))};
    }
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return {static_cast<uint16_t>(sign | ((rounded - (112u << 23)) >> 13))};
}

constexpr int kLanes = 16;
typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t LaneIndices __attribute__((vector_size(kLanes * sizeof(int32_t))));

// One instruction set per clone, chosen at load time; compiled without contraction they all give the same bits.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define ALGM_VECTOR_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define ALGM_VECTOR_CLONES
#endif
#define ALGM_INLINE inline __attribute__((always_inline))

template <class T>
ALGM_INLINE void load(const T *from, int64_t count, Lanes &lanes) {
    for (int l = 0; l < count; ++l) lanes[l] = to_float(from[l]);
}
template <>
ALGM_INLINE void load<float>(const float *from, int64_t count, Lanes &lanes) {
    std::memcpy(&lanes, from, static_cast<size_t>(count) * sizeof(float));
}

// Dot products of one row with R others.
template <class T, int R>
ALGM_INLINE void dots(const T *a, const T *const (&b)[R], int64_t width, float (&out)[R]) {
    Lanes sum[R] = {};
    int64_t d = 0;
    for (; d + kLanes <= width; d += kLanes) {
        Lanes left, right;
        load(a + d, kLanes, left);
        for (int r = 0; r < R; ++r) {
            load(b[r] + d, kLanes, right);
            sum[r] += left * right;
        }
    }
    Lanes left = {};
    load(a + d, width - d, left);
    for (int r = 0; r < R; ++r) {
        Lanes right = {};
        load(b[r] + d, width - d, right);
        sum[r] += left * right;
        for (int half = kLanes / 2; half > 0; half /= 2)
            for (int l = 0; l < half; ++l) sum[r][l] += sum[r][l + half];
        out[r] = sum[r][0];
    }
}

template <class T>
ALGM_INLINE float dot(const T *a, const T *b, int64_t width) {
    float out[1];
    const T *const rows[1] = {b};
    dots<T, 1>(a, rows, width, out);
    return out[0];
}

template <class T>
ALGM_INLINE float inverse_norm(const T *row, int64_t width) {
    return 1.0f / std::fmax(std::sqrt(dot(row, row, width)), kNormEps);
}

// Calls function.operator()<T>() for the token type that `dtype` names.
template <class Function>
void with_dtype(int32_t dtype, Function function) {
    switch (dtype) {
        case ALGM_FLOAT16: function(Half{}); break;
        case ALGM_BFLOAT16: function(Bfloat16{}); break;
        default: function(float{}); break;
    }
}

// Does what takes memory of its own, and returns its status: callers may be threads of a pool, which end the process
// where an exception leaves them.
template <class Work>
int with_memory(Work &&work) {
    try {
        work();
    } catch (const std::bad_alloc &) {
        return ALGM_OUT_OF_MEMORY;
    }
    return ALGM_OK;
}

}  // namespace algm::cpu

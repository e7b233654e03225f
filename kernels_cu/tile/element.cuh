// element.cuh -- number formats: float16, bfloat16, tf32, and the float32 functions softmax needs.
#pragma once
#include "config.cuh"
#include "tile/scope.cuh"

struct half_t { u16 bits; };
struct bfloat_t { u16 bits; };

template <Dtype> struct ElementOf;
template <> struct ElementOf<FLOAT16> { typedef half_t type; };
template <> struct ElementOf<BFLOAT16> { typedef bfloat_t type; };
template <> struct ElementOf<FLOAT32> { typedef float type; };
typedef ElementOf<DTYPE>::type Element;
typedef ElementOf<FLOAT32_RESULTS ? FLOAT32 : DTYPE>::type Result;          // of out, or of dq, dk and dv
constexpr bool WITH_TERMS = SCORES == PLUS_LINEAR || SCORES == PLUS_COLUMN; // rows of a fragment have a part of the score in common, see tile/score_context.cuh

#if ON_GPU
OP u32 float_bits(float x) { return __float_as_uint(x); }
OP float bits_float(u32 x) { return __uint_as_float(x); }
#else
OP u32 float_bits(float x) { u32 u; std::memcpy(&u, &x, 4); return u; }
OP float bits_float(u32 u) { float x; std::memcpy(&x, &u, 4); return x; }
#endif
OP float infinity() { return bits_float(0x7f800000u); }

OP float to_float(float x) { return x; }
OP float to_float(bfloat_t x) { return bits_float(u32(x.bits) << 16); }
OP float to_float(half_t x) {
#if ON_GPU
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
#else
  const u32 sign = u32(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
  if (magnitude >= 0x7c00) return bits_float(sign | 0x7f800000u | (magnitude << 13));         // infinity and NaN
  return bits_float(sign | float_bits(bits_float(magnitude << 13) * 0x1p112f));               // also right for subnormals
#endif
}

template <typename T> OP T from_float(float x);
template <> OP float from_float<float>(float x) { return x; }
template <> OP bfloat_t from_float<bfloat_t>(float x) {
  const u32 u = float_bits(x);
  return {u16(x != x ? 0x7fff : (u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}
template <> OP half_t from_float<half_t>(float x) {
  half_t y;
#if ON_GPU
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
  const u32 u = float_bits(x), sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffff;
  if (magnitude > 0x7f800000) y.bits = 0x7fff;
  else if (magnitude >= 0x477ff000) y.bits = u16(sign | 0x7c00);                              // rounds beyond 65504
  else if (magnitude < 0x38800000)                                                            // subnormal: one addition rounds it
    y.bits = u16(sign | (float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000));
  else y.bits = u16(sign | ((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13));
#endif
  return y;
}

// two neighbouring elements in one word
template <typename T> OP u32 pack(float lo, float hi) { return u32(from_float<T>(lo).bits) | u32(from_float<T>(hi).bits) << 16; }
#if ON_GPU
OP u32 cvt_rn_f16x2(float lo, float hi) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}
OP u32 cvt_rn_bf16x2(float lo, float hi) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}
template <> OP u32 pack<bfloat_t>(float lo, float hi) { return cvt_rn_bf16x2(lo, hi); }
template <> OP u32 pack<half_t>(float lo, float hi) {
  if constexpr (ARCH >= 80) return cvt_rn_f16x2(lo, hi);
  else return u32(from_float<half_t>(lo).bits) | u32(from_float<half_t>(hi).bits) << 16;
}
#endif
template <typename T> OP float unpack(u32 word, int which) { return to_float(T{u16(which ? word >> 16 : word)}); }

// nearest tf32 number (10 mantissa bits), ties away from zero, as a float32
OP float round_tf32(float x) {
#if ON_GPU
  u32 y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return bits_float(y);
#else
  return x - x != 0.f ? x : bits_float((float_bits(x) + 0x1000u) & ~0x1fffu);
#endif
}

// 2^x; results below the normal range are zero
OP float exp2_approx(float x) {
#if ON_GPU
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return x < -126.f ? 0.f : exp2f(x);
#endif
}

// log2 x of a positive normal x, to 2^-22 or two units in the last place
OP float log2_approx(float x) {
#if ON_GPU
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return log2f(x);
#endif
}

constexpr float HIGHEST = 0x1.fffffep127f;                     // the largest float32
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

// a * b + c, rounded up
OP float fma_up(float a, float b, float c) {
#if ON_GPU
  return __fmaf_ru(a, b, c);
#else
  const float nearest = fmaf(a, b, c);
  const double rest = double(a) * b + c - nearest;            // of which the sign is right, however it is rounded
  return rest > 0. ? nextafterf(nearest, HUGE_VALF) : nearest;
#endif
}

// 1 / x to about one unit in the last place; 0 for x beyond 2^126
OP float reciprocal(float x) {
#if ON_GPU
  return __fdividef(1.f, x);
#else
  return 1.f / x;
#endif
}

// 1 / sqrt x of a positive normal x, to 2^-22
OP float rsqrt_approx(float x) {
#if ON_GPU
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.f / sqrtf(x);
#endif
}

// The smaller and the larger number. NaN if x is.
OP float min_nan(float x, float limit) {
#if ON_GPU
  if constexpr (ARCH >= 80) {
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(limit));
    return y;
  }
#endif
  return x > limit ? limit : x;
}
OP float max_nan(float x, float limit) {
#if ON_GPU
  if constexpr (ARCH >= 80) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(limit));
    return y;
  }
#endif
  return x < limit ? limit : x;
}

// tanh x = h / sqrt(1 + h^2), h = sinh x, with an error relative to tanh x, near 2^-22, because softcap multiplies it. (tanh.approx is off by
// 2^-11, and 1 - 2 / (e^2x + 1) by 2^-22 of 1.) An error of h counts for 1 / cosh^2 x of itself, so that a polynomial of x^2 will do for h / x:
// minimax under this weight for |x| up to 9, beyond which tanh is 1, it adds 2^-24.
OP float tanh_by_sinh(float x) {
  x = max_nan(min_nan(x, 9.f), -9.f);
  const float square = x * x;
  float h = 0x1.232f8ap-25f;
  h = fmaf(h, square, 0x1.601a5cp-19f);
  h = fmaf(h, square, 0x1.a19578p-13f);
  h = fmaf(h, square, 0x1.110640p-7f);
  h = fmaf(h, square, 0x1.5555a4p-3f);
  h = fmaf(h, square, 1.f) * x;
  return h * rsqrt_approx(fmaf(h, h, 1.f));
}

// interval.cuh -- arithmetic of intervals: between which values lies what the pairs of a tile compute. Bounds may be further apart than need be, but
// every pair's value is between them:
//
//   int     a result that 32 bits might not hold may be anything, as the pair's own is
//   float   both bounds of what might be NaN are NaN, which no comparison is sure of. Bounds round as pairs do, but that a product may be computed
//           in one operation with a sum, and not be rounded: it has an ulp more on either side
//   bool    surely false, surely true, or unknown
#pragma once
#include "tile/element.cuh"

template <typename T> struct Interval {
  T low, high;                                                // both included
};

constexpr int LARGEST_INT = 0x7fffffff, LOWEST_INT = -LARGEST_INT - 1;
template <typename T> OP Interval<T> anything();
template <> OP Interval<int> anything() { return {LOWEST_INT, LARGEST_INT}; }
template <> OP Interval<float> anything() { return {bits_float(0x7fffffffu), bits_float(0x7fffffffu)}; }
template <> OP Interval<bool> anything() { return {false, true}; }
template <typename T> OP Interval<T> exactly(T x) { return {x, x}; }

// of two, or NaN if either is
template <typename T> OP T least(T a, T b) { return a < b || a != a ? a : b; }
template <typename T> OP T greatest(T a, T b) { return a > b || a != a ? a : b; }

// between the least of these and the greatest of those, whatever lane has them
template <typename T> constexpr bool IS_INT = false;
template <> constexpr bool IS_INT<int> = true;
template <typename T> OP Interval<T> hull_of_lanes(Regs<T, 1>& low, Regs<T, 1>& high) {
  if constexpr (ARCH >= 80 && IS_INT<T>) return {redux_min(low), redux_max(high)};
  reduce_lanes<32>(low, [](T a, T b) { return least(a, b); });
  reduce_lanes<32>(high, [](T a, T b) { return greatest(a, b); });
  return {low.at(0, 0), high.at(0, 0)};
}

// whether it is no NaN
template <typename T> OP bool is_number(const Interval<T>& x) { return x.low <= x.high; }
OP bool is_finite(const Interval<float>& x) { return x.low > -infinity() && x.high < infinity(); }
// bounds that were computed wider, if they are of the type
OP Interval<int> held(i64 low, i64 high) { return low < LOWEST_INT || high > LARGEST_INT ? anything<int>() : Interval<int>{int(low), int(high)}; }
OP Interval<float> held(float low, float high) { return is_finite({low, high}) ? Interval<float>{low, high} : anything<float>(); }
// more than an ulp on either side
OP Interval<float> widened(const Interval<float>& x) {
  const auto ulps = [](float bound) { return fabsf(bound) * 0x1p-22f + 0x1p-126f; };
  return held(x.low - ulps(x.low), x.high + ulps(x.high));
}

OP Interval<int> operator+(const Interval<int>& a, const Interval<int>& b) { return held(i64(a.low) + b.low, i64(a.high) + b.high); }
OP Interval<int> operator-(const Interval<int>& a, const Interval<int>& b) { return held(i64(a.low) - b.high, i64(a.high) - b.low); }
OP Interval<float> operator+(const Interval<float>& a, const Interval<float>& b) { return held(a.low + b.low, a.high + b.high); }
OP Interval<float> operator-(const Interval<float>& a, const Interval<float>& b) { return held(a.low - b.high, a.high - b.low); }
OP Interval<int> operator-(const Interval<int>& x) { return exactly(0) - x; }
OP Interval<float> operator-(const Interval<float>& x) { return {-x.high, -x.low}; }
// between the products of bounds, of which any may be the least
template <typename Wide> OP Interval<Wide> products(Wide a_low, Wide a_high, Wide b_low, Wide b_high) {
  const Wide one = a_low * b_low, two = a_low * b_high, three = a_high * b_low, four = a_high * b_high;
  return {min_of(min_of(one, two), min_of(three, four)), max_of(max_of(one, two), max_of(three, four))};
}
OP Interval<int> operator*(const Interval<int>& a, const Interval<int>& b) {
  const Interval<i64> wide = products<i64>(a.low, a.high, b.low, b.high);
  return held(wide.low, wide.high);
}
OP Interval<float> operator*(const Interval<float>& a, const Interval<float>& b) {
  return is_finite(a) && is_finite(b) ? widened(products(a.low, a.high, b.low, b.high)) : anything<float>();
}
// As Python's // and %, by one number above 0.
OP i64 whole_quotient(int a, int b) { return i64(a / b) - (a % b < 0); }
OP Interval<int> floor_div(const Interval<int>& a, const Interval<int>& b) {
  if (b.low != b.high || b.low <= 0) return anything<int>();
  const i64 low = whole_quotient(a.low, b.low);
  return low * b.low < LOWEST_INT ? anything<int>() : held(low, whole_quotient(a.high, b.low));             // a pair subtracts the rest first
}
OP Interval<int> floor_mod(const Interval<int>& a, const Interval<int>& b) {
  if (b.low != b.high || b.low <= 0) return anything<int>();
  const i64 below = whole_quotient(a.low, b.low);
  if (below != whole_quotient(a.high, b.low)) return {0, b.low - 1};
  return held(a.low - below * b.low, a.high - below * b.low);
}
OP Interval<int> operator>>(const Interval<int>& a, const Interval<int>& b) {
  return b.low == b.high && 0 <= b.low && b.low < 32 ? Interval<int>{a.low >> b.low, a.high >> b.low} : anything<int>();
}
OP Interval<float> floor(const Interval<float>& x) { return {floorf(x.low), floorf(x.high)}; }

template <typename T> OP Interval<T> min(const Interval<T>& a, const Interval<T>& b) {
  return is_number(a) && is_number(b) ? Interval<T>{min_of(a.low, b.low), min_of(a.high, b.high)} : anything<T>();
}
template <typename T> OP Interval<T> max(const Interval<T>& a, const Interval<T>& b) {
  return is_number(a) && is_number(b) ? Interval<T>{max_of(a.low, b.low), max_of(a.high, b.high)} : anything<T>();
}
template <typename T> OP Interval<T> abs(const Interval<T>& x) { return max(x, -x); }

template <typename T> OP Interval<float> as_float(const Interval<T>& x) { return {float(x.low), float(x.high)}; }
OP Interval<int> as_int(const Interval<bool>& x) { return {int(x.low), int(x.high)}; }
OP Interval<int> as_int(const Interval<float>& x) {
  return x.low >= -0x1p31f && x.high < 0x1p31f ? Interval<int>{int(x.low), int(x.high)} : anything<int>();
}

template <typename T> OP Interval<bool> operator<(const Interval<T>& a, const Interval<T>& b) { return {a.high < b.low, !(a.low >= b.high)}; }
template <typename T> OP Interval<bool> operator<=(const Interval<T>& a, const Interval<T>& b) { return {a.high <= b.low, !(a.low > b.high)}; }
template <typename T> OP Interval<bool> operator==(const Interval<T>& a, const Interval<T>& b) {
  return {a.low == a.high && b.low == b.high && a.low == b.low, !(a.high < b.low || b.high < a.low)};
}
OP Interval<bool> operator!(const Interval<bool>& x) { return {!x.high, !x.low}; }
template <typename T> OP Interval<bool> operator!=(const Interval<T>& a, const Interval<T>& b) { return !(a == b); }
OP Interval<bool> operator&(const Interval<bool>& a, const Interval<bool>& b) { return {a.low && b.low, a.high && b.high}; }
OP Interval<bool> operator|(const Interval<bool>& a, const Interval<bool>& b) { return {a.low || b.low, a.high || b.high}; }
template <typename T> OP Interval<T> where(const Interval<bool>& condition, const Interval<T>& a, const Interval<T>& b) {
  if (condition.low == condition.high) return condition.low ? a : b;
  return is_number(a) && is_number(b) ? Interval<T>{min_of(a.low, b.low), max_of(a.high, b.high)} : anything<T>();
}

// The queries and keys of a tile, as PairPlace has those of a pair.
struct TilePlace {
  Interval<int> q_idx, kv_idx;
  OP Interval<float> q_float() const { return as_float(q_idx); }
  OP Interval<float> kv_float() const { return as_float(kv_idx); }
  OP Interval<float> distance(const Interval<float>& more) const { return q_float() + more - kv_float(); }
};

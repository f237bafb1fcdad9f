// The sampler's exponentials, and the bits of floating-point numbers.
#pragma once
#include "gpu/math.h"

template <class T> struct Bits;
template <> struct Bits<double> { typedef u64 Word; enum { FRACTION = 52, BIAS = 1023 }; };
template <> struct Bits<float> { typedef u32 Word; enum { FRACTION = 23, BIAS = 127 }; };
template <class T> DEV typename Bits<T>::Word bits_of(T v) { return __builtin_bit_cast(typename Bits<T>::Word, v); }

// The exponent of a number that is not negative.
template <class T> DEV int exponent_of(T v) { return (int)(bits_of(v) >> Bits<T>::FRACTION) - Bits<T>::BIAS; }

// The C library's expf for arguments up to 0, by the steps of `src/sampler/exp.rs`. NaN stays NaN.
struct Exponential {
  const u64* powers;                                       // 2^(i / POWERS), less i << 47
  double inverse;                                          // of the temperature
  float max;
  // x / T - max. A quotient of float32 numbers is never nearer than 2^-49 of itself to the midpoint of two float32
  // numbers, and the product with 1 / T has an error of at most 2^-52: so it rounds as the quotient does.
  DEV float argument(float logit) const { return add_rn((float)(logit * inverse), -max); }
  DEV float operator()(float argument) const {
    const double magic = 0x1.8p52, log2_e_32 = 0x1.71547652b82fep5;
    const double x = argument < -104.5f ? -104.5f : argument;
    const double rounded = fma_rn(x, log2_e_32, magic);
    const double r = fma_rn(x, log2_e_32, magic - rounded);
    const u64 k = bits_of(rounded);
    const double high = fma_rn(0x1.c6af84b912394p-20, r, 0x1.ebfce50fac4f3p-13);
    const double low = fma_rn(0x1.62e42ff0c52d6p-6, r, 1.0);
    return (float)(fma_rn(high, r * r, low) * __builtin_bit_cast(double, powers[k % POWERS] + (k << 47)));
  }
};

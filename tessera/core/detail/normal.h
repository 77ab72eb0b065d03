// Box and Muller on many pairs at once, in plain additions, multiplications,
// divisions and roots of doubles: the bits do not depend on the C library, nor
// on how many are computed together, and compilers turn the loops into vector
// instructions.
//
// Errors: of log_of below 1, of sine and cosine below 2 last places.
// Source: the polynomials are those of fdlibm (Sun Microsystems 1993): e_log.c,
//         k_sin.c, k_cos.c. Their notice is in NOTICE, beside LICENSE.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <numbers>

namespace tessera::random::detail {

// For integers of less than 2^51, by the mantissa of a sum: x86 has no vector
// instruction for it before AVX-512.
constexpr double kShift = 0x1.8p52;

inline double nearest_whole(double x) { return (x + kShift) - kShift; }

inline double to_double(int64_t whole) {
  return std::bit_cast<double>(std::bit_cast<int64_t>(kShift) + whole) - kShift;
}

// log(x). REQUIRES: x is normal and positive.
inline double log_of(double x) {
  // x = 2^k m with m in [sqrt(1/2), sqrt(2)), and f = m - 1.
  constexpr uint64_t kRootHalf = 0x3fe6a09e667f3bcd;
  const uint64_t bits = std::bit_cast<uint64_t>(x) - kRootHalf;
  const int64_t k = static_cast<int64_t>(bits >> 52) -
                    (static_cast<int64_t>(bits >> 63) << 12);
  const double f =
      std::bit_cast<double>((bits & 0x000fffffffffffff) + kRootHalf) - 1.0;
  const double s = f / (2.0 + f), z = s * s, w = z * z;
  const double odd =
      w * (3.999999999940941908e-01 +
           w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
  const double even =
      z * (6.666666666666735130e-01 +
           w * (2.857142874366239149e-01 +
                w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
  const double half_square = 0.5 * f * f;
  const double exponent = to_double(k);
  constexpr double kLn2High = 6.93147180369123816490e-01;
  constexpr double kLn2Low = 1.90821492927058770002e-10;
  return exponent * kLn2High - ((half_square - (s * (half_square + odd + even) +
                                                exponent * kLn2Low)) -
                                f);
}

struct SineCosine {
  double sine;
  double cosine;
};

// Of 2 pi u. REQUIRES: u in [0, 1).
inline SineCosine sine_cosine_of_turn(double u) {
  // A quarter turn q, and the rest x in [-pi/4, pi/4].
  const double q = nearest_whole(4.0 * u);
  const double x = (u - 0.25 * q) * (2.0 * std::numbers::pi), z = x * x;
  const double sine =
      x + x * z *
              (-1.66666666666666324348e-01 +
               z * (8.33333333332248946124e-03 +
                    z * (-1.98412698298579493134e-04 +
                         z * (2.75573137070700676789e-06 +
                              z * (-2.50507602534068634195e-08 +
                                   z * 1.58969099521155010221e-10)))));
  const double cosine =
      1.0 -
      (0.5 * z - z * z *
                     (4.16666666666666019037e-02 +
                      z * (-1.38888888888741095749e-03 +
                           z * (2.48015872894767294178e-05 +
                                z * (-2.75573143513906633035e-07 +
                                     z * (2.08757232129817482790e-09 +
                                          z * -1.13596475577881948265e-11))))));
  // q = 1: (cos, -sin), 2: (-sin, -cos), 3: (-cos, sin), 4 is 0 again. The low
  // bits of q + kShift's mantissa are q's.
  const auto turn = std::bit_cast<uint64_t>(q + kShift);
  const uint64_t swapped = uint64_t{0} - (turn & 1);
  const uint64_t a = std::bit_cast<uint64_t>(sine);
  const uint64_t b = std::bit_cast<uint64_t>(cosine);
  const uint64_t exchange = (a ^ b) & swapped;
  const uint64_t sine_sign = (turn & 2) << 62;
  const uint64_t cosine_sign = ((turn + 1) & 2) << 62;
  return {.sine = std::bit_cast<double>((a ^ exchange) ^ sine_sign),
          .cosine = std::bit_cast<double>((b ^ exchange) ^ cosine_sign)};
}

}  // namespace tessera::random::detail

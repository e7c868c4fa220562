// Every kernel, for one instruction set. This file is compiled several times, each with the flags of one set and
// -DJPAGED_ISA=its name.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "kernels.h"

#define JPAGED_TEXT_(x) #x
#define JPAGED_TEXT(x) JPAGED_TEXT_(x)

namespace jpaged {
namespace {  // what templates of one instruction set instantiate must not be taken for another's by the linker
#include "simd.h"
#include "linear.h"
#include "attention.h"
#include "pages.h"
}  // namespace

namespace JPAGED_ISA {
extern const Kernels kernels;
const Kernels kernels{JPAGED_TEXT(JPAGED_ISA), kPanel, &linear, &take_rows, &attention, &write};
}  // namespace JPAGED_ISA
}  // namespace jpaged

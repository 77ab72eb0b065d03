// Owns a precompiled header that targets reuse (cmake/pch.h, pch_modules.h).
namespace tessera::detail {
extern const int kPrecompiledHeader;
const int kPrecompiledHeader = 1;
}  // namespace tessera::detail

// Owns the precompiled header that every target reuses (cmake/pch.h).
namespace tessera::detail {
extern const int kPrecompiledHeader;
const int kPrecompiledHeader = 1;
}  // namespace tessera::detail

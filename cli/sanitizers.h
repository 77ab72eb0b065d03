// Whether a sanitizer watches this program: it has an operator new of its own,
// and nothing may run before it.
#pragma once

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TS_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || \
    __has_feature(memory_sanitizer)
#define TS_SANITIZED 1
#endif
#endif
#ifndef TS_SANITIZED
#define TS_SANITIZED 0
#endif

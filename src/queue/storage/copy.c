#include "queue/storage/copy.h"

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>

/* Least bytes for non-temporal stores. The C library uses them only from half of the last cache on.
 */
#define MANY ((size_t)4 << 20)
enum { LINE = 64, PAGE = 4096, PAGES = 4, AHEAD = 8 * LINE };

static inline void copy_line(uint8_t *to, const uint8_t *from)
{
    __m128i part[LINE / 16];
    _mm_prefetch((const char *)from + AHEAD, _MM_HINT_T0);
    for (int i = 0; i < LINE / 16; i++)
        part[i] = _mm_loadu_si128((const __m128i_u *)(from + i * 16));
    for (int i = 0; i < LINE / 16; i++)
        _mm_stream_si128((__m128i *)(to + i * 16), part[i]);
}

/* Copies several pages at the same time, so that several banks of the memory are used. `to` must be
 * aligned to a line. Returns the number of bytes copied. */
static size_t copy_pages(uint8_t *to, const uint8_t *from, size_t bytes)
{
    size_t done = 0;
    for (; bytes - done >= (size_t)PAGES * PAGE; done += (size_t)PAGES * PAGE)
        for (size_t line = done; line < done + PAGE; line += LINE)
            for (int page = 0; page < PAGES; page++)
                copy_line(to + line + (size_t)page * PAGE, from + line + (size_t)page * PAGE);
    _mm_sfence();
    return done;
}

void dray__copy_away(void *to, const void *from, size_t bytes)
{
    size_t head = -(uintptr_t)to & (LINE - 1), done = 0;
    if (bytes >= MANY) {
        memcpy(to, from, head);
        done = head + copy_pages((uint8_t *)to + head, (const uint8_t *)from + head, bytes - head);
    }
    memcpy((uint8_t *)to + done, (const uint8_t *)from + done, bytes - done);
}

#else

void dray__copy_away(void *to, const void *from, size_t bytes)
{
    memcpy(to, from, bytes);
}

#endif

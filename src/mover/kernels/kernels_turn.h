/* Part of kernels_body.h: transposes. A square with a side of 16 bytes is transposed in registers.
 * Squares fill a buffer of whole cache lines, so that the destination, whose rows are far apart, is
 * written a line at a time. */

#if defined(__SSE2__)

#define LOAD_ROW(r) _mm_loadu_si128((const __m128i_u *)(from + (r)*from_stride))
#define STORE_ROW(r, v) _mm_storeu_si128((__m128i_u *)(to + (r)*to_stride), v)
/* One step of the butterfly over `half` pairs: v[2i], v[2i+1] from u[i], u[i + half]. */
#define WEAVE(v, u, half, low, high)                                                               \
    for (int i = 0; i < (half); i++) {                                                             \
        v[2 * i] = low(u[i], u[i + (half)]);                                                       \
        v[2 * i + 1] = high(u[i], u[i + (half)]);                                                  \
    }

/* log2(side) steps of interleaving the first half of the rows with the second: each moves one bit
 * of the row's number into the column's. */
#define SQUARE(size, side, steps, low, high)                                                       \
    static inline __attribute__((always_inline)) void square##size(                                \
        const uint8_t *from, int64_t from_stride, uint8_t *to, int64_t to_stride)                  \
    {                                                                                              \
        __m128i u[side], v[side];                                                                  \
        for (int r = 0; r < (side); r++)                                                           \
            u[r] = LOAD_ROW(r);                                                                    \
        for (int s = 0; s < (steps); s++) {                                                        \
            WEAVE(v, u, (side) / 2, low, high)                                                     \
            for (int r = 0; r < (side); r++)                                                       \
                u[r] = v[r];                                                                       \
        }                                                                                          \
        for (int r = 0; r < (side); r++)                                                           \
            STORE_ROW(r, u[r]);                                                                    \
    }
SQUARE(1, 16, 4, _mm_unpacklo_epi8, _mm_unpackhi_epi8)
SQUARE(2, 8, 3, _mm_unpacklo_epi16, _mm_unpackhi_epi16)
SQUARE(4, 4, 2, _mm_unpacklo_epi32, _mm_unpackhi_epi32)
SQUARE(8, 2, 1, _mm_unpacklo_epi64, _mm_unpackhi_epi64)

#else

#define SQUARE(size, side)                                                                         \
    static void square##size(const uint8_t *from, int64_t from_stride, uint8_t *to,                \
                             int64_t to_stride)                                                    \
    {                                                                                              \
        for (int r = 0; r < (side); r++)                                                           \
            for (int c = 0; c < (side); c++)                                                       \
                memcpy(to + c * to_stride + r * (size), from + r * from_stride + c * (size),       \
                       size);                                                                      \
    }
SQUARE(1, 16)
SQUARE(2, 8)
SQUARE(4, 4)
SQUARE(8, 2)

#endif

enum { LINE = 64, SIDE_BYTES = 16, PANEL_BYTES = 1024 };

static inline void put_line(uint8_t *to, const uint8_t *line)
{
#if defined(__SSE2__)
    if (((uintptr_t)to & (LINE - 1)) == 0) { /* written as a whole: no need to read it first */
        for (int i = 0; i < LINE; i += SIDE_BYTES)
            _mm_stream_si128((__m128i *)(to + i), _mm_load_si128((const __m128i *)(line + i)));
        return;
    }
#endif
    memcpy(to, line, LINE);
}

static inline void put_lines_end(void)
{
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

/* Transposes the rest at the edges, one element after the other. */
static void turn_edge(const uint8_t *source, int64_t source_stride, uint8_t *destination,
                      int64_t destination_stride, size_t rows, size_t columns, size_t size)
{
    for (size_t c = 0; c < columns; c++)
        for (size_t r = 0; r < rows; r++)
            memcpy(destination + (int64_t)c * destination_stride + r * size,
                   source + (int64_t)r * source_stride + c * size, size);
}

/* Goes through panels of some columns from top to bottom, as many rows at once as fill a cache line
 * of the destination. The next rows are prefetched in software, because the hardware's prefetcher
 * does not follow so many rows. */
#define TURN(size)                                                                                 \
    enum { BLOCK##size = LINE / (size), SIDE##size = SIDE_BYTES / (size) };                        \
    static void turn_rows##size(const uint8_t *source, int64_t source_stride, uint8_t *to,         \
                                int64_t destination_stride, size_t columns)                        \
    {                                                                                              \
        enum { BLOCK = BLOCK##size, SIDE = SIDE##size };                                           \
        const uint8_t *next = source + BLOCK * source_stride;                                      \
        size_t c = 0;                                                                              \
        for (; c + SIDE <= columns; c += SIDE) {                                                   \
            uint8_t lines[SIDE * LINE] __attribute__((aligned(LINE)));                             \
            for (size_t i = c / SIDE; i < BLOCK; i += PANEL_BYTES / SIDE_BYTES)                    \
                for (int j = 0; j < PANEL_BYTES; j += LINE)                                        \
                    __builtin_prefetch(next + (int64_t)i * source_stride + j);                     \
            for (int i = 0; i < BLOCK; i += SIDE)                                                  \
                square##size(source + i * source_stride + c * (size), source_stride,               \
                             lines + i * (size), LINE);                                            \
            for (int i = 0; i < SIDE; i++, to += destination_stride)                               \
                put_line(to, lines + i * LINE);                                                    \
        }                                                                                          \
        turn_edge(source + c * (size), source_stride, to, destination_stride, BLOCK, columns - c,  \
                  size);                                                                           \
    }                                                                                              \
    static void turn##size(const uint8_t *source, int64_t source_stride, uint8_t *destination,     \
                           int64_t destination_stride, size_t rows, size_t columns)                \
    {                                                                                              \
        enum { BLOCK = BLOCK##size, SIDE = SIDE##size, PANEL = PANEL_BYTES / (size) };             \
        for (size_t first = 0, n; first < columns; first += n) {                                   \
            n = columns - first < PANEL ? columns - first : PANEL;                                 \
            const uint8_t *from = source + first * (size);                                         \
            uint8_t *to = destination + (int64_t)first * destination_stride;                       \
            size_t r = 0;                                                                          \
            for (; r + BLOCK <= rows; r += BLOCK, from += BLOCK * source_stride, to += LINE)       \
                turn_rows##size(from, source_stride, to, destination_stride, n);                   \
            for (; r + SIDE <= rows; r += SIDE, from += SIDE * source_stride, to += SIDE_BYTES) {  \
                size_t c = 0;                                                                      \
                for (; c + SIDE <= n; c += SIDE)                                                   \
                    square##size(from + c * (size), source_stride,                                 \
                                 to + (int64_t)c * destination_stride, destination_stride);        \
                turn_edge(from + c * (size), source_stride, to + (int64_t)c * destination_stride,  \
                          destination_stride, SIDE, n - c, size);                                  \
            }                                                                                      \
            turn_edge(from, source_stride, to, destination_stride, rows - r, n, size);             \
        }                                                                                          \
        put_lines_end();                                                                           \
    }
TURN(1)
TURN(2)
TURN(4)
TURN(8)

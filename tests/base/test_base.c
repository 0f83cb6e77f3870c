/* Tests of base: the encoding of messages, hash maps, words, errors, random numbers. */
#include "base/clock.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/io.h"
#include "base/options.h"
#include "base/random.h"
#include "base/wire.h"
#include "base/words.h"
#include "suite.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

TEST(errors_have_names_and_texts)
{
    assert_string_equal(dray_error_name(DRAY_EHOLE), "EHOLE");
    assert_string_equal(dray_error_name(0), "OK");
    assert_string_equal(dray_error_name(-9999), "E?");
    dray_error e;
    assert_int_equal(dray__fail_errno(&e, ENOENT, "file %s", "x"), DRAY_ESYS);
    assert_int_equal(e.origin, DRAY_ORIGIN_ERRNO);
    assert_int_equal(e.raw, ENOENT);
    assert_string_equal(e.message, "file x: No such file or directory");
    dray__fail_prefix(&e, e.code, "open of %s: ", "y");
    assert_string_equal(e.message, "open of y: file x: No such file or directory");
    dray__fail(&e, DRAY_EINVALID, "was: %s", e.message);
    assert_string_equal(e.message, "was: open of y: file x: No such file or directory");
    assert_int_equal(dray__fail(NULL, DRAY_EINVALID, "nobody listens"), DRAY_EINVALID);
}

TEST(wire_reads_what_it_wrote)
{
    dray__writer w = {0};
    dray__put_u8(&w, 7);
    dray__put_u16(&w, 0xBEEF);
    dray__put_u32(&w, 0xDEADBEEF);
    dray__put_u64(&w, UINT64_MAX - 1);
    dray__put_i64(&w, -5);
    dray__put_f64(&w, -0.125);
    dray__put_string(&w, "größe");
    dray__put_blob(&w, "a\0b", 3);
    assert_int_equal(dray__writer_check(&w, NULL), DRAY_OK);
    for (size_t size = 0; size < w.size; size++) { /* every truncation is an error */
        dray__reader r = dray__reader_of(w.data, size);
        dray__get_u8(&r), dray__get_u16(&r), dray__get_u32(&r), dray__get_u64(&r);
        dray__get_i64(&r), dray__get_u64(&r);
        free(dray__get_string(&r, 100));
        size_t n;
        dray__get_blob(&r, &n);
        assert_int_equal(dray__reader_finish(&r, "test", NULL), DRAY_EFORMAT);
    }
    dray__reader r = dray__reader_of(w.data, w.size);
    assert_int_equal(dray__get_u8(&r), 7);
    assert_int_equal(dray__get_u16(&r), 0xBEEF);
    assert_int_equal(dray__get_u32(&r), 0xDEADBEEF);
    assert_true(dray__get_u64(&r) == UINT64_MAX - 1);
    assert_int_equal(dray__get_i64(&r), -5);
    assert_true(dray__get_u64(&r) == 0xBFC0000000000000); /* -0.125, by IEEE 754 */
    char *text = dray__get_string(&r, 100);
    assert_non_null(text);
    assert_string_equal(text, "größe");
    free(text);
    size_t n;
    assert_memory_equal(dray__get_blob(&r, &n), "a\0b", 3);
    assert_int_equal(n, 3);
    assert_int_equal(dray__reader_finish(&r, "test", NULL), DRAY_OK);
    dray__writer_free(&w);
}

TEST(forged_counts_are_refused)
{
    uint8_t data[8] = {0xFF, 0xFF, 0xFF, 0x7F, 0, 0, 0, 0};
    dray__reader r = dray__reader_of(data, sizeof data);
    assert_int_equal(dray__get_count(&r, 1), 0);
    assert_true(r.failed);
}

TEST(utf8_follows_rfc3629)
{
    assert_true(dray__utf8_valid("a\xC3\xA4\xE2\x82\xAC\xF0\x9F\x98\x80", 10));
    assert_false(dray__utf8_valid("\xC0\x80", 2));
    assert_false(dray__utf8_valid("\xED\xA0\x80", 3));
    assert_false(dray__utf8_valid("\xF4\x90\x80\x80", 4));
    assert_false(dray__utf8_valid("\xE2\x82", 2));
}

TEST(map_behaves_like_a_model)
{
    enum { KEYS = 300 };
    bool there[KEYS] = {false};
    uint32_t values[KEYS] = {0};
    dray__map map = {0};
    for (uint64_t i = 0; i < 20000; i++) {
        uint32_t k = (uint32_t)(dray__random_u64(1, 0, i) % KEYS);
        char key[16];
        snprintf(key, sizeof key, "key%u", k);
        uint32_t value;
        if (dray__random_u64(1, 1, i) % 20 == 0) {
            assert_true(dray__map_set(&map, key, (uint32_t)i));
            there[k] = true;
            values[k] = (uint32_t)i;
        } else {
            assert_int_equal(dray__map_get(&map, key, &value), there[k]);
            if (there[k])
                assert_int_equal(value, values[k]);
        }
    }
    dray__map_free(&map);
}

/* Setting what is there needs no memory: nothing moves. */
TEST(numbers_are_set_again_in_place)
{
    dray__idmap map = {0};
    for (uint64_t key = 1; map.count * 4 < map.capacity * 3 || !map.count; key++)
        assert_true(dray__idmap_set(&map, key, &map));
    size_t capacity = map.capacity, count = map.count;
    for (uint64_t key = 1; key <= count; key++)
        assert_true(dray__idmap_set(&map, key, &capacity));
    assert_int_equal(map.capacity, capacity);
    assert_int_equal(map.count, count);
    assert_ptr_equal(dray__idmap_get(&map, count), &capacity);
    dray__idmap_free(&map);
}

TEST(nearest_word)
{
    const char *words[] = {"direct", "bucket", "parameter"};
    assert_int_equal(dray__word_nearest("bukcet", words, 3), 1);
    assert_int_equal(dray__word_nearest("param", words, 3), -1);
    assert_int_equal(dray__word_nearest("paramter", words, 3), 2);
    assert_int_equal(dray__word_nearest("zzz", words, 3), -1);
    assert_int_equal(dray__word_distance("ab", "ba"), 1);
    char endless[1000] = {0};
    memset(endless, 'z', sizeof endless - 1);
    assert_int_equal(dray__word_nearest(endless, words, 3), -1);
}

/* Known answers of Random123's kat_vectors for philox4x32-10. */
TEST(philox_gives_the_published_answers)
{
    dray__philox zero = dray__philox4x32((uint32_t[4]){0}, (uint32_t[2]){0});
    assert_memory_equal(zero.v, ((uint32_t[]){0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}), 16);
    uint32_t f = 0xffffffff;
    dray__philox ones = dray__philox4x32((uint32_t[4]){f, f, f, f}, (uint32_t[2]){f, f});
    assert_memory_equal(ones.v, ((uint32_t[]){0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}), 16);
    double sum = 0, square = 0;
    for (uint64_t i = 0; i < 100000; i++) {
        double x = dray__random_normal(3, 4, i);
        sum += x;
        square += x * x;
    }
    assert_true(fabs(sum / 1e5) < 0.02 && fabs(square / 1e5 - 1) < 0.02);
}

TEST(deadlines_saturate)
{
    assert_true(dray__deadline(INT64_MAX) == INT64_MAX);
    assert_int_equal(dray__left_ms(dray__deadline(-1)), 0);
    assert_true(dray__left_ms(dray__deadline(DRAY__SECOND)) > 900);
}

/* A struct as a library of now knows it, and as callers of other versions do. */
typedef struct options_now {
    size_t size;
    uint64_t a;
    int32_t b;
    uint64_t c; /* came later */
} options_now;

typedef struct options_first {
    size_t size;
    uint64_t a;
    int32_t b;
} options_first;

typedef struct options_later {
    options_now now;
    uint64_t d;
} options_later;

#define OPTIONS_FIRST dray__end_of(options_first, b)

TEST(options_of_other_versions)
{
    const options_now defaults = {sizeof defaults, 1, 2, 3};
    options_now out = defaults;
    dray_error e;
    assert_int_equal(dray__options_read(&out, sizeof out, OPTIONS_FIRST, NULL, "o", &e), DRAY_OK);
    assert_memory_equal(&out, &defaults, sizeof out);
    options_first old = {sizeof old, 10, 20};
    assert_int_equal(dray__options_read(&out, sizeof out, OPTIONS_FIRST, &old, "o", &e), DRAY_OK);
    assert_true(out.size == sizeof out && out.a == 10 && out.b == 20 && out.c == 3);
    options_later new = {{sizeof new, 30, 40, 50}, 0};
    assert_int_equal(dray__options_read(&out, sizeof out, OPTIONS_FIRST, &new, "o", &e), DRAY_OK);
    assert_true(out.size == sizeof out && out.a == 30 && out.b == 40 && out.c == 50);
    out = defaults;
    new.d = UINT64_C(1) << 56;
    assert_int_equal(dray__options_read(&out, sizeof out, OPTIONS_FIRST, &new, "o", &e),
                     DRAY_EVERSION);
    static const size_t wrong[] = {0, 7, OPTIONS_FIRST - 1, 4097, SIZE_MAX};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        new.now.size = wrong[i];
        assert_int_equal(dray__options_read(&out, sizeof out, OPTIONS_FIRST, &new, "o", &e),
                         DRAY_EINVALID);
        assert_int_equal(dray__options_check(&new, OPTIONS_FIRST, "o", &e), DRAY_EINVALID);
    }
    assert_memory_equal(&out, &defaults, sizeof out); /* what was refused changed nothing */
}

TEST(results_for_callers_of_other_versions)
{
    const options_now filled = {sizeof filled, 1, 2, 3};
    struct {
        options_first first;
        uint64_t guard;
    } old = {{sizeof old.first, 0, 0}, 77};
    dray__options_fill(&old.first, &filled, sizeof filled);
    assert_true(old.first.size == sizeof old.first && old.first.a == 1 && old.first.b == 2);
    assert_true(old.guard == 77);
    options_later new = {{sizeof new, 9, 9, 9}, 9};
    dray__options_fill(&new, &filled, sizeof filled);
    assert_true(new.now.size == sizeof new &&new.now.a == 1 && new.now.c == 3 && new.d == 0);
}

/* Sizes about those at which the buffer grows; what was not written to its end changes nothing. */
TEST(files_are_read_and_written_whole)
{
    static const size_t sizes[] = {0, 1, 4095, 4096, 4097, 20000};
    char folder[] = "/tmp/dray-test-XXXXXX", path[64], data[20000], *text = NULL;
    size_t size = 0;
    dray_error e;
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/file", folder);
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (char)(i * 7 + i / 256);
    assert_int_equal(dray__read_stream(fopen(path, "r"), path, 10, &text, &size, &e), DRAY_ENOENT);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        FILE *file = dray__begin_file(path);
        assert_non_null(file);
        bool written = fwrite(data, 1, sizes[i], file) == sizes[i];
        assert_int_equal(dray__end_file(file, written, path, &e), DRAY_OK);
        assert_int_equal(dray__read_stream(fopen(path, "r"), path, sizes[i], &text, &size, &e),
                         DRAY_OK);
        assert_int_equal(size, sizes[i]);
        assert_memory_equal(text, data, size);
        assert_int_equal(text[size], 0);
        free(text);
        if (sizes[i])
            assert_int_equal(
                dray__read_stream(fopen(path, "r"), path, sizes[i] - 1, &text, &size, &e),
                DRAY_EFORMAT);
    }
    FILE *half = dray__begin_file(path);
    assert_true(half && fputs("half", half) >= 0);
    assert_int_equal(dray__end_file(half, false, path, &e), DRAY_ESYS);
    assert_int_equal(dray__read_stream(fopen(path, "r"), path, sizeof data, &text, &size, &e),
                     DRAY_OK);
    assert_int_equal(size, sizeof data);
    free(text);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(rmdir(folder), 0); /* nothing lies beside it */
}

SUITE(NULL, NULL)

/* Compares tables of fields with the functions of base/wire.h that write and read one field per
 * call. */
#include "base/random.h"
#include "base/wire.h"
#include "seed.h"
#include "suite.h"

#include <stdint.h>
#include <stdio.h>
#include <time.h>

typedef struct item {
    uint32_t a, b;
    double c;
} item;

typedef struct part {
    const char *name;
    bool on;
    const item *items;
    uint32_t item_count;
    bool more;
    uint32_t last;
} part;

typedef struct whole {
    uint8_t small;
    int32_t sign;
    int64_t times[3];
    const char *text, *lines;
    part first;
    const part *parts;
    const uint64_t *numbers;
    uint32_t part_count, number_count;
    double real;
} whole;

static const dray__fields item_fields = DRAY__FIELDS(item, DRAY__NUMBERS(item, a, b, c));
static const dray__fields part_fields =
    DRAY__FIELDS(part, DRAY__FIELD_TEXT(part, name, 20), DRAY__NUMBERS(part, on),
                 DRAY__FIELD_LIST(part, items, item_count, item_fields),
                 DRAY__FIELD_GUARD(part, more), DRAY__NUMBERS(part, last));
static const dray__fields whole_fields = DRAY__FIELDS(
    whole, DRAY__NUMBERS(whole, small, sign), DRAY__FIELD_ARRAY(whole, times),
    DRAY__FIELD_TEXT(whole, text, 10), DRAY__FIELD_PROSE(whole, lines, 100),
    DRAY__FIELD_STRUCT(whole, first, part_fields),
    DRAY__FIELD_LIST(whole, parts, part_count, part_fields),
    DRAY__FIELD_LIST(whole, numbers, number_count, dray__u64_fields), DRAY__NUMBERS(whole, real));

static const item items[] = {{1, 2, 0.5}, {UINT32_MAX, 0, -3}, {7, 8, 9}};
static const part parts[] = {
    {"p", true, items, 3, true, 5}, {"", false, NULL, 0, false, 0}, {"q", true, items, 1, true, 0}};
static const uint64_t numbers[] = {UINT64_MAX, 1};
static const whole sample = {.small = 200,
                             .sign = -5,
                             .times = {INT64_MIN, 0, 12},
                             .text = "gr\xc3\xb6\xc3\x9f"
                                     "e",
                             .lines = "one\ntwo",
                             .first = {"f", false, items + 1, 2, true, 9},
                             .parts = parts,
                             .part_count = 3,
                             .numbers = numbers,
                             .number_count = 2,
                             .real = 1e300};

static void put_part(dray__writer *w, const part *p)
{
    dray__put_string(w, p->name);
    dray__put_u8(w, p->on);
    dray__put_u32(w, p->item_count);
    for (uint32_t i = 0; i < p->item_count; i++) {
        dray__put_u32(w, p->items[i].a);
        dray__put_u32(w, p->items[i].b);
        dray__put_f64(w, p->items[i].c);
    }
    dray__put_u8(w, p->more);
    if (p->more)
        dray__put_u32(w, p->last);
}

static void put_whole(dray__writer *w, const whole *s)
{
    dray__put_u8(w, s->small);
    dray__put_u32(w, (uint32_t)s->sign);
    for (int i = 0; i < 3; i++)
        dray__put_i64(w, s->times[i]);
    dray__put_string(w, s->text);
    dray__put_string(w, s->lines);
    put_part(w, &s->first);
    dray__put_u32(w, s->part_count);
    for (uint32_t i = 0; i < s->part_count; i++)
        put_part(w, &s->parts[i]);
    dray__put_u32(w, s->number_count);
    for (uint32_t i = 0; i < s->number_count; i++)
        dray__put_u64(w, s->numbers[i]);
    dray__put_f64(w, s->real);
}

static dray__writer bytes_of(void)
{
    dray__writer w = {0};
    put_whole(&w, &sample);
    assert_false(w.failed);
    return w;
}

TEST(test_written_as_by_hand)
{
    dray__writer w = {0}, by_hand = bytes_of();
    dray__put_fields(&w, &whole_fields, &sample);
    assert_int_equal(w.size, by_hand.size);
    assert_memory_equal(w.data, by_hand.data, w.size);
    assert_true(dray__fields_least(&whole_fields) ==
                1 + 4 + 24 + 4 + 4 + (4 + 1 + 4 + 1) + 4 + 4 + 8);
    dray__writer_free(&w);
    dray__writer_free(&by_hand);
}

TEST(test_read_again)
{
    dray__writer w = bytes_of(), again = {0};
    dray__reader r = dray__reader_of(w.data, w.size);
    dray__arena arena = {0};
    whole read = {0};
    dray__get_fields(&r, &arena, &whole_fields, &read);
    assert_int_equal(dray__reader_finish(&r, "sample", NULL), DRAY_OK);
    put_whole(&again, &read);
    assert_int_equal(again.size, w.size);
    assert_memory_equal(again.data, w.data, w.size);
    dray__arena_free(&arena);
    dray__writer_free(&again);
    dray__writer_free(&w);
}

typedef struct list {
    const uint64_t *numbers;
    uint32_t number_count;
} list;

static const dray__fields list_fields =
    DRAY__FIELDS(list, DRAY__FIELD_LIST(list, numbers, number_count, dray__u64_fields));

/* An arena into which one message after the other is read, most of them with nothing new, does not
 * grow. */
TEST(test_empty_list)
{
    dray__writer w = {0};
    dray__arena arena = {0};
    list read = {0};
    dray__put_fields(&w, &list_fields, &read);
    dray__reader r = dray__reader_of(w.data, w.size);
    dray__get_fields(&r, &arena, &list_fields, &read);
    assert_int_equal(dray__reader_finish(&r, "list", NULL), DRAY_OK);
    assert_int_equal(read.number_count, 0);
    assert_null(arena.chunks);
    dray__writer_free(&w);
}

/* Any beginning of it is short, and leaves nothing that would be followed. */
TEST(test_short)
{
    dray__writer w = bytes_of();
    for (size_t size = 0; size < w.size; size++) {
        dray__reader r = dray__reader_of(w.data, size);
        dray__arena arena = {0};
        whole read;
        memset(&read, 0xA5, sizeof read);
        dray__get_fields(&r, &arena, &whole_fields, &read);
        assert_true(r.failed);
        assert_true(read.number_count == 0 || size > w.size - 9);
        assert_true(read.part_count <= 3);
        dray__arena_free(&arena);
    }
    dray__writer_free(&w);
}

/* What is accepted of changed bytes is written as the same bytes, but for what is not 0 or 1 of a
 * bool. */
TEST(test_random)
{
    uint64_t seed = test_seed(), draws = 0;
    uint32_t accepted = 0;
    for (int round = 0; round < 20000; round++) {
        dray__writer w = bytes_of(), again = {0};
        uint64_t drawn = dray__random_u64(seed, 1, draws++);
        w.data[(drawn >> 8) % w.size] ^= (uint8_t)(1u << drawn % 8);
        dray__reader r = dray__reader_of(w.data, w.size);
        dray__arena arena = {0};
        whole read;
        dray__get_fields(&r, &arena, &whole_fields, &read);
        if (dray__reader_finish(&r, "sample", NULL) == DRAY_OK) {
            dray__put_fields(&again, &whole_fields, &read);
            assert_int_equal(again.size, w.size);
            accepted += memcmp(again.data, w.data, w.size) == 0;
        }
        dray__arena_free(&arena);
        dray__writer_free(&again);
        dray__writer_free(&w);
    }
    assert_true(accepted > 5000 && accepted < 20000);
}

static void refuse(const whole *what, const char *why)
{
    dray__writer w = {0};
    dray_error error;
    dray__put_fields(&w, &whole_fields, what);
    dray__reader r = dray__reader_of(w.data, w.size);
    dray__arena arena = {0};
    whole read;
    dray__get_fields(&r, &arena, &whole_fields, &read);
    assert_int_equal(dray__reader_finish(&r, "sample", &error), DRAY_EFORMAT);
    assert_non_null(strstr(error.message, why));
    dray__arena_free(&arena);
    dray__writer_free(&w);
}

TEST(test_texts)
{
    whole changed = sample;
    changed.text = "0123456789a";
    refuse(&changed, "too long a text");
    changed.text = "a\nb";
    refuse(&changed, "a control character in a name");
    changed.text = "\xff";
    refuse(&changed, "a text that is not UTF-8");
}

SUITE(NULL, NULL)

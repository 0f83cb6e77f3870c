/* What the subcommands share; cmd.h says what each function is for. */
#include "base/words.h"
#include "cmd/cmd.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* ---- arguments ------------------------------------------------------------------------------- */

enum { OPTIONS_MAX = 96 };

/* The long options of an argp and its children, flat. */
typedef struct option_list {
    const char *names[OPTIONS_MAX]; /* with the two dashes: what a person types */
    char text[OPTIONS_MAX][48];
    bool takes_value[OPTIONS_MAX];
    char keys[OPTIONS_MAX + 1]; /* short names, and beside each whether it takes a value */
    bool key_takes_value[OPTIONS_MAX];
    size_t count, key_count;
} option_list;

static void add_option(option_list *list, const char *name, int key, bool takes_value)
{
    if (name && list->count < OPTIONS_MAX) {
        snprintf(list->text[list->count], sizeof(list->text[0]), "--%s", name);
        list->names[list->count] = list->text[list->count];
        list->takes_value[list->count++] = takes_value;
    }
    if (key > ' ' && key < 127 && list->key_count < OPTIONS_MAX) {
        list->keys[list->key_count] = (char)key;
        list->key_takes_value[list->key_count++] = takes_value;
    }
}

static void collect_options(const struct argp *argp, option_list *list)
{
    bool takes_value = false;
    for (const struct argp_option *o = argp->options; o && (o->name || o->key || o->doc); o++) {
        if (!(o->flags & OPTION_ALIAS))
            takes_value = o->arg && !(o->flags & OPTION_ARG_OPTIONAL);
        if (!(o->flags & OPTION_DOC))
            add_option(list, o->name, o->key, takes_value);
    }
    for (const struct argp_child *c = argp->children; c && c->argp; c++)
        collect_options(c->argp, list);
}

/* Index of the option that `word` ("--name" or "--name=value") names whole or begins; -1: none. */
static long match_long(const option_list *list, const char *word, size_t length)
{
    long begun = -1;
    for (size_t i = 0; i < list->count; i++) {
        if (strncmp(list->names[i], word, length) != 0)
            continue;
        if (strlen(list->names[i]) == length)
            return (long)i;
        begun = (long)i; /* an abbreviation; getopt refuses it when it is ambiguous */
    }
    return begun;
}

/* Whether the short options in `word` ("-abc") take the next argument as a value. */
static bool short_takes_next(const option_list *list, const char *word)
{
    for (const char *c = word + 1; *c; c++) {
        const char *key = memchr(list->keys, *c, list->key_count);
        if (key && list->key_takes_value[key - list->keys])
            return c[1] == 0;
    }
    return false;
}

static void refuse_option(const option_list *list, const char *program, const char *word,
                          size_t length)
{
    char name[64], hint[128];
    snprintf(name, sizeof(name), "%.*s", (int)(length < 60 ? length : 60), word);
    fprintf(stderr, "%s: unknown option '%s'%s\nTry '%s --help' for the list.\n", program, name,
            dray__word_hint(name, list->names, list->count, hint, sizeof(hint)), program);
    exit(CMD_USAGE);
}

void cmd_parse(const struct argp *argp, int argc, char **argv, void *input)
{
    static char help_option[] = "--help";
    option_list list = {.count = 0};
    collect_options(argp, &list);
    bool has_h = memchr(list.keys, 'h', list.key_count) != NULL;
    add_option(&list, "help", '?', false);
    add_option(&list, "usage", 0, false);
    for (int i = 1; i < argc; i++) {
        const char *word = argv[i];
        if (strcmp(word, "--") == 0)
            break;
        if (word[0] != '-' || !word[1])
            continue;
        if (strcmp(word, "-h") == 0 && !has_h) {
            argv[i] = help_option;
        } else if (word[1] != '-') {
            i += short_takes_next(&list, word);
        } else {
            size_t length = strcspn(word, "=");
            long found = match_long(&list, word, length);
            if (found < 0)
                refuse_option(&list, argv[0], word, length);
            i += list.takes_value[found] && !word[length];
        }
    }
    error_t status = argp_parse(argp, argc, argv, 0, NULL, input);
    if (status) {
        fprintf(stderr, "%s: %s\n", argv[0], strerror(status));
        exit(CMD_USAGE);
    }
}

void cmd_bad_word(const struct argp_state *state, const char *what, const char *word,
                  const char *const *words, size_t count)
{
    char hint[256];
    argp_error(state, "unknown %s '%s'%s", what, word,
               dray__word_hint_or_all(word, words, count, hint, sizeof(hint)));
}

int cmd_bad_part(const char *command, const char *word, const char *const *parts, size_t count)
{
    static const char *const help[] = {"--help"};
    char hint[256];
    bool option = word[0] == '-';
    fprintf(
        stderr, "dray %s: unknown %s '%s'%s\nTry 'dray %s --help' for the list.\n", command,
        option ? "option" : "part", word,
        dray__word_hint_or_all(word, option ? help : parts, option ? 1 : count, hint, sizeof(hint)),
        command);
    return CMD_USAGE;
}

int64_t cmd_number(const struct argp_state *state, const char *what, const char *text, int64_t min,
                   int64_t max)
{
    char *end = NULL;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (errno || end == text || *end || value < min || value > max)
        argp_error(state, "%s: expected a number from %lld to %lld, found '%s'", what,
                   (long long)min, (long long)max, text);
    return value;
}

/* ---- errors ---------------------------------------------------------------------------------- */

int cmd_fail(const char *name, const dray_error *error)
{
    return cmd_failf(name, "%s", error->message[0] ? error->message : dray_strerror(error->code));
}

int cmd_refuse(const char *name, const dray_error *error)
{
    int status = cmd_fail(name, error);
    return error->code == DRAY_EINVALID ? CMD_USAGE : status;
}

int cmd_refuse_job(const char *name, const dray_error *error)
{
    int status = cmd_refuse(name, error);
    return error->code == DRAY_EFORMAT ? CMD_USAGE : status;
}

int cmd_failf(const char *name, const char *format, ...)
{
    va_list arguments;
    fflush(stdout); /* so that both streams on one terminal keep their order */
    fprintf(stderr, "dray %s: ", name);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    return CMD_FAILED;
}

int cmd_error(dray_error *error, int code, const char *format, ...)
{
    va_list arguments;
    *error = (dray_error){.code = code};
    va_start(arguments, format);
    vsnprintf(error->message, sizeof(error->message), format, arguments);
    va_end(arguments);
    return code;
}

/* ---- numbers --------------------------------------------------------------------------------- */

/* Three digits, whatever the size: 1.23, 12.3, 123. */
static cmd_text three_digits(double value, const char *unit)
{
    cmd_text text;
    double size = fabs(value);
    int decimals = size < 9.995 ? 2 : size < 99.95 ? 1 : 0;
    snprintf(text.s, sizeof(text.s), "%.*f %s", decimals, value, unit);
    return text;
}

static cmd_text scaled(double value, const char *const *units, size_t count)
{
    size_t i = 0;
    cmd_text text;
    for (; fabs(value) >= 999.5 && i + 1 < count; i++)
        value /= 1000;
    if (i > 0)
        return three_digits(value, units[i]);
    snprintf(text.s, sizeof(text.s), "%.0f%s%s", value, units[0][0] ? " " : "", units[0]);
    return text;
}

cmd_text cmd_bytes(double bytes)
{
    static const char *const units[] = {"B", "kB", "MB", "GB", "TB", "PB", "EB"};
    return scaled(bytes, units, sizeof(units) / sizeof(units[0]));
}

cmd_text cmd_count(double count)
{
    static const char *const units[] = {"", "k", "M", "G", "T"};
    return scaled(count, units, sizeof(units) / sizeof(units[0]));
}

cmd_text cmd_seconds(double seconds)
{
    cmd_text text;
    if (seconds < 999.5e-9)
        return three_digits(seconds * 1e9, "ns");
    if (seconds < 999.5e-6)
        return three_digits(seconds * 1e6, "us");
    if (seconds < 999.5e-3)
        return three_digits(seconds * 1e3, "ms");
    if (seconds < 99.95)
        return three_digits(seconds, "s");
    uint64_t whole = (uint64_t)(seconds + 0.5);
    if (whole < 3600)
        snprintf(text.s, sizeof(text.s), "%u min %u s", (unsigned)(whole / 60),
                 (unsigned)(whole % 60));
    else
        snprintf(text.s, sizeof(text.s), "%lu h %u min", (unsigned long)(whole / 3600),
                 (unsigned)(whole / 60 % 60));
    return text;
}

/* ---- output ---------------------------------------------------------------------------------- */

static void need(const void *pointer)
{
    if (pointer)
        return;
    fputs("dray: out of memory\n", stderr);
    exit(CMD_FAILED);
}

void cmd_json_line(json_t *object)
{
    need(object);
    char *line = json_dumps(object, JSON_COMPACT);
    need(line);
    puts(line);
    fflush(stdout);
    free(line);
    json_decref(object);
}

struct cmd_table {
    const char *const *headings;
    char **cells;
    size_t columns, count, capacity;
};

cmd_table *cmd_table_new(const char *const *headings)
{
    cmd_table *table = calloc(1, sizeof(*table));
    need(table);
    table->headings = headings;
    while (headings[table->columns])
        table->columns++;
    return table;
}

void cmd_cell(cmd_table *table, const char *format, ...)
{
    if (table->count == table->capacity) {
        table->capacity = table->capacity ? 2 * table->capacity : 64;
        table->cells = reallocarray(table->cells, table->capacity, sizeof(*table->cells));
        need(table->cells);
    }
    va_list arguments;
    va_start(arguments, format);
    if (vasprintf(&table->cells[table->count], format, arguments) < 0)
        need(NULL);
    va_end(arguments);
    table->count++;
}

static const char *title(const cmd_table *table, size_t column)
{
    const char *heading = table->headings[column];
    return heading + (heading[0] == '>');
}

/* Columns on a terminal: UTF-8 continuation bytes take none. */
static size_t width_of(const char *text)
{
    size_t width = 0;
    for (; *text; text++)
        width += ((unsigned char)*text & 0xC0) != 0x80;
    return width;
}

static const char *cell_text(const cmd_table *table, size_t row, size_t column)
{
    size_t cell = row * table->columns + column;
    return row == SIZE_MAX ? title(table, column) : cell < table->count ? table->cells[cell] : "";
}

/* Row SIZE_MAX: the headings. No blanks at the end of a line. */
static void print_row(const cmd_table *table, const size_t *widths, size_t row, FILE *out)
{
    size_t blanks = 0;
    for (size_t c = 0; c < table->columns; c++, blanks += 2) {
        const char *text = cell_text(table, row, c);
        size_t pad = widths[c] - width_of(text);
        bool right = table->headings[c][0] == '>';
        if (text[0]) {
            fprintf(out, "%*s%s", (int)(blanks + (right ? pad : 0)), "", text);
            blanks = right ? 0 : pad;
        } else {
            blanks += pad;
        }
    }
    fputc('\n', out);
}

void cmd_table_print(cmd_table *table, FILE *out)
{
    size_t *widths = calloc(table->columns, sizeof(*widths));
    need(widths);
    for (size_t c = 0; c < table->columns; c++)
        widths[c] = width_of(title(table, c));
    for (size_t i = 0; i < table->count; i++) {
        size_t width = width_of(table->cells[i]), c = i % table->columns;
        widths[c] = width > widths[c] ? width : widths[c];
    }
    print_row(table, widths, SIZE_MAX, out);
    for (size_t row = 0; row * table->columns < table->count; row++)
        print_row(table, widths, row, out);
    for (size_t i = 0; i < table->count; i++)
        free(table->cells[i]);
    free(table->cells);
    free(table);
    free(widths);
}

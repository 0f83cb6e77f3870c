/* The functions that the subcommands share; cmd.h describes them. */
#include "base/words.h"
#include "cmd/cmd.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

int64_t cmd_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * CMD_SECOND + t.tv_nsec;
}

/* ---- arguments ------------------------------------------------------------------------------- */

enum { OPTIONS_MAX = 64, KEY_FIRST = 256 /* of the options without a letter */ };

/* The data of argp's parser: the usage and all of its options. */
typedef struct parsing {
    const cmd_usage *usage;
    const cmd_option *options[OPTIONS_MAX];
    size_t count;
    char *to;
} parsing;

/* Returns the option that `word` ("--name" or "--name=value") names, in full or abbreviated; NULL
 * when there is none. */
static const cmd_option *match_long(const parsing *p, const char *word, size_t length)
{
    const cmd_option *begun = NULL;
    for (size_t i = 0; i < p->count; i++) {
        const char *name = p->options[i]->name;
        if (!name || strncmp(name, word + 2, length - 2) != 0)
            continue;
        if (strlen(name) == length - 2)
            return p->options[i];
        begun = p->options[i]; /* an abbreviation; getopt refuses it when it is ambiguous */
    }
    return begun;
}

static const cmd_option *match_short(const parsing *p, char letter)
{
    for (size_t i = 0; i < p->count; i++)
        if (p->options[i]->key == letter)
            return p->options[i];
    return NULL;
}

/* Returns whether the short options in `word` ("-abc") take the next argument as a value. */
static bool short_takes_next(const parsing *p, const char *word)
{
    for (const char *c = word + 1; *c; c++) {
        const cmd_option *option = match_short(p, *c);
        if (option && option->value)
            return c[1] == 0;
    }
    return false;
}

static void refuse_option(const parsing *p, const char *program, const char *word, size_t length)
{
    char name[64], hint[128], text[OPTIONS_MAX][48];
    const char *names[OPTIONS_MAX];
    size_t count = 0;
    for (size_t i = 0; i < p->count; i++)
        if (p->options[i]->name) {
            snprintf(text[count], sizeof(text[0]), "--%s", p->options[i]->name);
            names[count] = text[count];
            count++;
        }
    snprintf(name, sizeof(name), "%.*s", (int)(length < 60 ? length : 60), word);
    fprintf(stderr, "%s: unknown option '%s'%s\nTry '%s --help' for the list.\n", program, name,
            dray__word_hint(name, names, count, hint, sizeof(hint)), program);
    exit(CMD_USAGE);
}

void cmd_put_text(const struct argp_state *state, const cmd_option *option, void *at,
                  const char *text)
{
    (void)state, (void)option;
    *(const char **)at = text;
}

void cmd_put_flag(const struct argp_state *state, const cmd_option *option, void *at,
                  const char *text)
{
    (void)state, (void)option, (void)text;
    *(bool *)at = true;
}

void cmd_put_number(const struct argp_state *state, const cmd_option *option, void *at,
                    const char *text)
{
    *(int64_t *)at = cmd_number(state, option->name, text, option->min, option->max);
}

void cmd_put_real(const struct argp_state *state, const cmd_option *option, void *at,
                  const char *text)
{
    char *end = NULL;
    double value = strtod(text, &end), min = (double)option->min, max = (double)option->max;
    bool above = option->what != NULL, low = above ? value > min : value >= min;
    if (end == text || *end || !low || !(value <= max))
        argp_error(state, "--%s: expected a number %s %.0f %s %.0f, found '%s'", option->name,
                   above ? "above" : "from", min, above ? "and up to" : "to", max, text);
    *(double *)at = value;
}

void cmd_put_word(const struct argp_state *state, const cmd_option *option, void *at,
                  const char *text)
{
    size_t count = 0;
    for (; option->words[count]; count++)
        if (strcmp(text, option->words[count]) == 0) {
            *(int *)at = (int)count;
            return;
        }
    cmd_bad_word(state, option->what, text, option->words, count);
}

void cmd_put_words(const struct argp_state *state, const cmd_option *option, void *at,
                   const char *text)
{
    unsigned bits = 0;
    for (const char *rest = text; rest; rest = strchr(rest, ',') ? strchr(rest, ',') + 1 : NULL) {
        char word[48];
        int index = 0;
        snprintf(word, sizeof(word), "%.*s", (int)strcspn(rest, ","), rest);
        cmd_put_word(state, option, &index, word);
        bits |= 1u << index;
    }
    *(unsigned *)at = bits;
}

void cmd_put_list(const struct argp_state *state, const cmd_option *option, void *at,
                  const char *text)
{
    cmd_list *list = at;
    if (list->count == CMD_LIST_MAX)
        argp_error(state, "--%s '%s': at most %d expected", option->name, text, CMD_LIST_MAX);
    list->items[list->count++] = text;
}

void cmd_put_seed(const struct argp_state *state, const cmd_option *option, void *at,
                  const char *text)
{
    cmd_settings *settings = at;
    snprintf(settings->seed, sizeof(settings->seed), "seed=%lld",
             (long long)cmd_number(state, option->name, text, option->min, option->max));
    cmd_put_list(state, option, &settings->list, settings->seed);
}

/* Stores an argument that is not an option. */
static void put_argument(const parsing *p, const char *text, const struct argp_state *state)
{
    const cmd_usage *u = p->usage;
    cmd_list *list = (cmd_list *)(void *)(p->to + u->words_at);
    if (!u->most)
        argp_error(state, "expected no arguments, found '%s'", text);
    else if (list->count == u->most)
        argp_error(state, "expected %s, found '%s' too", u->words, text);
    else
        list->items[list->count++] = text;
}

static error_t parse(int key, char *text, struct argp_state *state)
{
    const parsing *p = state->input;
    const cmd_usage *u = p->usage;
    for (size_t i = 0; i < p->count; i++) {
        const cmd_option *o = p->options[i];
        if (o->put && key == (o->key ? o->key : KEY_FIRST + (int)i)) {
            o->put(state, o, p->to + o->at, text);
            return 0;
        }
    }
    if (key == ARGP_KEY_ARG)
        put_argument(p, text, state);
    else if (key != ARGP_KEY_END)
        return ARGP_ERR_UNKNOWN;
    else if (u->least > state->arg_num)
        argp_error(state, "expected %s", u->words);
    else if (u->check)
        u->check(state, p->to);
    return 0;
}

/* Collects all options in argp's form. */
static void collect(const cmd_usage *usage, parsing *p, struct argp_option *out)
{
    int group = 0;
    for (const cmd_usage *u = usage; u; u = u->also)
        for (const cmd_option *o = u->options; (o->put || o->what) && p->count < OPTIONS_MAX - 2;
             o++) {
            if (!o->put)
                group = (int)o->min;
            if (o->put || o->doc)
                *out++ = (struct argp_option){.name = o->name,
                                              .key = o->key   ? o->key
                                                     : o->put ? KEY_FIRST + (int)p->count
                                                              : 0,
                                              .arg = o->value,
                                              .doc = o->doc,
                                              .flags = o->doc ? 0 : OPTION_HIDDEN,
                                              .group = group};
            p->options[p->count++] = o;
        }
}

/* Refuses tables that share a name or a letter, because one would take the other's value. */
static void refuse_clash(const parsing *p, const char *program)
{
    for (size_t i = 0; i < p->count; i++)
        for (size_t k = 0; k < i; k++) {
            const cmd_option *a = p->options[k], *b = p->options[i];
            bool letter = a->key && a->key == b->key;
            if (!a->name || !b->name || (!letter && strcmp(a->name, b->name) != 0))
                continue;
            fprintf(stderr, "%s: --%s and --%s: expected two options, found one %s\n", program,
                    a->name, b->name, letter ? "letter" : "name");
            exit(CMD_FAILED);
        }
}

void cmd_parse(const cmd_usage *usage, int argc, char **argv, void *to)
{
    static char help_option[] = "--help";
    static const cmd_option own[] = {{.name = "help", .key = '?'}, {.name = "usage"}};
    struct argp_option options[OPTIONS_MAX] = {{0}};
    parsing p = {.usage = usage, .to = to};
    collect(usage, &p, options);
    for (size_t i = 0; i < 2; i++)
        p.options[p.count++] = &own[i];
    refuse_clash(&p, argv[0]);
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++) {
        const char *word = argv[i];
        if (word[0] != '-' || !word[1])
            continue;
        if (strcmp(word, "-h") == 0 && !match_short(&p, 'h')) {
            argv[i] = help_option;
        } else if (word[1] != '-') {
            i += short_takes_next(&p, word);
        } else {
            size_t length = strcspn(word, "=");
            const cmd_option *found = match_long(&p, word, length);
            if (!found)
                refuse_option(&p, argv[0], word, length);
            i += found && found->value && !word[length];
        }
    }
    const struct argp argp = {.options = options,
                              .parser = parse,
                              .args_doc = usage->arguments,
                              .doc = usage->doc,
                              .help_filter = usage->help};
    error_t status = argp_parse(&argp, argc, argv, 0, NULL, &p);
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

int64_t cmd_number(const struct argp_state *state, const char *option, const char *text,
                   int64_t min, int64_t max)
{
    char *end = NULL;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (errno || end == text || *end || value < min || value > max)
        argp_error(state, "--%s: expected a number from %lld to %lld, found '%s'", option,
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

/* Returns the columns on a terminal. UTF-8 continuation bytes have none. */
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

/* Prints a row, or the headings for row SIZE_MAX, without blanks at the end of the line. */
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

#include "run/tree.h"

#include "base/error.h"
#include "base/words.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

enum { NODES_MAX = 10000, DEPTH_MAX = 16 };

void dray__tree_free(dray__node *node)
{
    if (!node)
        return;
    for (uint32_t i = 0; i < node->count; i++)
        dray__tree_free(node->children[i]);
    free(node->children);
    free(node->key);
    free(node->value);
    free(node);
}

static int node_new(int kind, const char *source, dray__place at, dray__node **out,
                    dray_error *error)
{
    dray__node *node = calloc(1, sizeof(*node));
    if (!node)
        return dray__nomem(error);
    node->kind = kind;
    node->source = source;
    node->at = at;
    *out = node;
    return DRAY_OK;
}

static int add_child(dray__node *parent, dray__node *child, dray_error *error)
{
    dray__node **children =
        realloc(parent->children, (parent->count + 1) * sizeof(*parent->children));
    if (!children)
        return dray__nomem(error);
    parent->children = children;
    parent->children[parent->count++] = child;
    return DRAY_OK;
}

dray__node *dray__tree_child(const dray__node *mapping, const char *key)
{
    for (uint32_t i = 0; i < mapping->count; i++)
        if (mapping->children[i]->key && strcmp(mapping->children[i]->key, key) == 0)
            return mapping->children[i];
    return NULL;
}

char *dray__place_text(const char *source, dray__place at, char out[DRAY__PLACE_BYTES])
{
    if (at.line > 0)
        snprintf(out, DRAY__PLACE_BYTES, "%s:%d:%d", source, at.line, at.column);
    else
        snprintf(out, DRAY__PLACE_BYTES, "%s", source);
    return out;
}

/* ---- reading --------------------------------------------------------------------------------- */

typedef struct conversion {
    yaml_document_t *document;
    const char *source;
    uint32_t nodes;
    dray_error *error;
} conversion;

static int convert(conversion *c, int index, const yaml_node_t *key, int depth, dray__node **out);

static dray__place place_of(yaml_mark_t mark)
{
    return (dray__place){(int)mark.line + 1, (int)mark.column + 1};
}

static int refuse(const char *source, dray__place at, dray_error *error, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

static int refuse(const char *source, dray__place at, dray_error *error, const char *format, ...)
{
    char message[DRAY_ERROR_MESSAGE_MAX], where[DRAY__PLACE_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof(message), format, arguments);
    va_end(arguments);
    return dray__fail(error, DRAY_EFORMAT, "%s: %s", dray__place_text(source, at, where), message);
}

static int convert_pairs(conversion *c, const yaml_node_t *from, int depth, dray__node *to)
{
    for (yaml_node_pair_t *p = from->data.mapping.pairs.start; p < from->data.mapping.pairs.top;
         p++) {
        const yaml_node_t *key = yaml_document_get_node(c->document, p->key);
        if (key->type != YAML_SCALAR_NODE)
            return refuse(c->source, place_of(key->start_mark), c->error,
                          "a key must be a plain word");
        const char *name = (const char *)key->data.scalar.value;
        if (dray__tree_child(to, name))
            return refuse(c->source, place_of(key->start_mark), c->error, "'%.64s' is there twice",
                          name);
        dray__node *child = NULL;
        int rc = convert(c, p->value, key, depth + 1, &child);
        if (rc)
            return rc;
        child->key = strdup(name);
        rc = child->key ? add_child(to, child, c->error) : dray__nomem(c->error);
        if (rc) {
            dray__tree_free(child);
            return rc;
        }
    }
    return DRAY_OK;
}

static int convert_items(conversion *c, const yaml_node_t *from, int depth, dray__node *to)
{
    for (yaml_node_item_t *item = from->data.sequence.items.start;
         item < from->data.sequence.items.top; item++) {
        dray__node *child = NULL;
        int rc = convert(c, *item, NULL, depth + 1, &child);
        if (rc)
            return rc;
        rc = add_child(to, child, c->error);
        if (rc) {
            dray__tree_free(child);
            return rc;
        }
    }
    return DRAY_OK;
}

/* key: NULL for what has none. */
static int convert(conversion *c, int index, const yaml_node_t *key, int depth, dray__node **out)
{
    const yaml_node_t *from = yaml_document_get_node(c->document, index);
    dray__place at = place_of((key ? key : from)->start_mark);
    if (depth > DEPTH_MAX || ++c->nodes > NODES_MAX)
        return refuse(c->source, at, c->error, "too big: at most %d levels and %d values expected",
                      DEPTH_MAX, NODES_MAX);
    dray__node *node = NULL;
    int rc = node_new(from->type == YAML_SCALAR_NODE     ? DRAY__NODE_SCALAR
                      : from->type == YAML_SEQUENCE_NODE ? DRAY__NODE_SEQUENCE
                                                         : DRAY__NODE_MAPPING,
                      c->source, at, &node, c->error);
    if (rc)
        return rc;
    if (from->type == YAML_SCALAR_NODE) {
        if (strlen((const char *)from->data.scalar.value) != from->data.scalar.length)
            rc = refuse(c->source, at, c->error, "a value holds a zero byte");
        else if (!(node->value = strdup((const char *)from->data.scalar.value)))
            rc = dray__nomem(c->error);
    } else if (from->type == YAML_SEQUENCE_NODE) {
        rc = convert_items(c, from, depth, node);
    } else {
        rc = convert_pairs(c, from, depth, node);
    }
    if (rc) {
        dray__tree_free(node);
        return rc;
    }
    *out = node;
    return DRAY_OK;
}

static int parse_failed(yaml_parser_t *parser, const char *source, dray_error *error)
{
    if (parser->error == YAML_MEMORY_ERROR)
        return dray__nomem(error);
    return refuse(source, place_of(parser->problem_mark), error, "%s%s%s",
                  parser->problem ? parser->problem : "not YAML", parser->context ? " " : "",
                  parser->context ? parser->context : "");
}

static int second_document(yaml_parser_t *parser, const char *source, dray_error *error)
{
    yaml_document_t more;
    if (!yaml_parser_load(parser, &more))
        return parse_failed(parser, source, error);
    const yaml_node_t *root = yaml_document_get_root_node(&more);
    int rc = root ? refuse(source, place_of(root->start_mark), error,
                           "one document expected, found another")
                  : DRAY_OK;
    yaml_document_delete(&more);
    return rc;
}

int dray__tree_parse(const char *text, size_t size, const char *source, dray__node **out,
                     dray_error *error)
{
    yaml_parser_t parser;
    yaml_document_t document;
    if (!yaml_parser_initialize(&parser))
        return dray__nomem(error);
    yaml_parser_set_input_string(&parser, (const unsigned char *)text, size);
    if (!yaml_parser_load(&parser, &document)) {
        int rc = parse_failed(&parser, source, error);
        yaml_parser_delete(&parser);
        return rc;
    }
    conversion c = {.document = &document, .source = source, .error = error};
    dray__node *root = NULL;
    int rc = yaml_document_get_root_node(&document)
                 ? convert(&c, 1, NULL, 0, &root)
                 : node_new(DRAY__NODE_MAPPING, source, (dray__place){1, 1}, &root, error);
    if (!rc && yaml_document_get_root_node(&document))
        rc = second_document(&parser, source, error);
    yaml_document_delete(&document);
    yaml_parser_delete(&parser);
    if (rc)
        dray__tree_free(root);
    else
        *out = root;
    return rc;
}

int dray__tree_setting(const char *setting, dray__node **out, dray_error *error)
{
    static const char source[] = "--set";
    const char *equals = strchr(setting, '=');
    if (!equals || equals == setting)
        return dray__fail(error, DRAY_EINVALID, "--set %s: expected KEY=VALUE, as in actor.lr=1e-3",
                          setting);
    const dray__place nowhere = {0};
    dray__node *node = NULL;
    dray_error why;
    int rc = equals[1] ? dray__tree_parse(equals + 1, strlen(equals + 1), source, &node, &why)
                       : node_new(DRAY__NODE_SCALAR, source, nowhere, &node, &why);
    if (rc) /* an argument is wrong, not a file */
        return dray__fail(error, rc == DRAY_EFORMAT ? DRAY_EINVALID : rc, "%s", why.message);
    if (!equals[1] && !(node->value = strdup(""))) {
        dray__tree_free(node);
        return dray__nomem(error);
    }
    /* From the last part of the key to the first: each wraps what is there in a mapping. */
    for (const char *end = equals; end;) {
        const char *begin = end;
        while (begin > setting && begin[-1] != '.')
            begin--;
        dray__node *parent = NULL;
        if (begin == end)
            rc = dray__fail(error, DRAY_EINVALID, "--set %s: a part of the key is empty", setting);
        else
            rc = node_new(DRAY__NODE_MAPPING, source, nowhere, &parent, error);
        if (!rc && !(node->key = strndup(begin, (size_t)(end - begin))))
            rc = dray__nomem(error);
        if (!rc)
            rc = add_child(parent, node, error);
        if (rc) {
            dray__tree_free(parent);
            dray__tree_free(node);
            return rc;
        }
        node->at = nowhere;
        node = parent;
        end = begin > setting ? begin - 1 : NULL;
    }
    *out = node;
    return DRAY_OK;
}

/* ---- layers ---------------------------------------------------------------------------------- */

static dray__node *named_item(const dray__node *sequence, const char *name)
{
    for (uint32_t i = 0; i < sequence->count; i++) {
        const dray__node *item = sequence->children[i];
        const dray__node *at =
            item->kind == DRAY__NODE_MAPPING ? dray__tree_child(item, "name") : NULL;
        if (at && at->kind == DRAY__NODE_SCALAR && strcmp(at->value, name) == 0)
            return sequence->children[i];
    }
    return NULL;
}

/* The node of `base` that `over` is laid on; NULL when there is none yet. */
static dray__node *counterpart(const dray__node *base, const dray__node *over)
{
    return base->kind == DRAY__NODE_SEQUENCE ? named_item(base, over->key)
                                             : dray__tree_child(base, over->key);
}

static bool can_merge(const dray__node *base, const dray__node *over)
{
    if (over->kind != DRAY__NODE_MAPPING || base->kind == DRAY__NODE_SCALAR)
        return false;
    if (base->kind == DRAY__NODE_MAPPING)
        return true;
    for (uint32_t i = 0; i < over->count; i++)
        if (!named_item(base, over->children[i]->key))
            return false;
    return over->count > 0;
}

/* Moves everything of `from` but the key into `to`. */
static void replace(dray__node *to, dray__node *from)
{
    for (uint32_t i = 0; i < to->count; i++)
        dray__tree_free(to->children[i]);
    free(to->children);
    free(to->value);
    char *key = to->key;
    free(from->key);
    *to = *from;
    to->key = key;
    free(from);
}

/* roles.engine.ranks=1: a section on a list names its entries. */
static int no_such_item(const dray__node *base, const dray__node *over, dray_error *error)
{
    const char *names[16], *name = NULL;
    char hint[128], where[DRAY__PLACE_BYTES];
    uint32_t count = 0;
    for (uint32_t i = 0; i < base->count && count < 16; i++) {
        const dray__node *at = base->children[i]->kind == DRAY__NODE_MAPPING
                                   ? dray__tree_child(base->children[i], "name")
                                   : NULL;
        if (at && at->kind == DRAY__NODE_SCALAR)
            names[count++] = at->value;
    }
    for (uint32_t i = 0; i < over->count && !name; i++)
        name = named_item(base, over->children[i]->key) ? NULL : over->children[i]->key;
    return dray__fail(
        error, DRAY_EINVALID, "%s: %s: expected a list, or the name of an entry, found '%.64s'%s",
        dray__place_text(over->source, over->at, where), base->key ? base->key : "list",
        name ? name : "", dray__word_hint(name ? name : "", names, count, hint, sizeof(hint)));
}

int dray__tree_merge(dray__node *base, dray__node *over, dray_error *error)
{
    if (base->kind == DRAY__NODE_SEQUENCE && over->kind == DRAY__NODE_MAPPING && over->count &&
        !can_merge(base, over)) {
        int wrong = no_such_item(base, over, error);
        dray__tree_free(over);
        return wrong;
    }
    if (!can_merge(base, over)) {
        replace(base, over);
        return DRAY_OK;
    }
    base->source = over->source;
    base->at = over->at;
    int rc = DRAY_OK;
    uint32_t i = 0;
    for (; i < over->count && !rc; i++) {
        dray__node *at = counterpart(base, over->children[i]);
        rc = at ? dray__tree_merge(at, over->children[i], error)
                : add_child(base, over->children[i], error);
        if (rc && !at)
            dray__tree_free(over->children[i]);
    }
    for (; i < over->count; i++)
        dray__tree_free(over->children[i]);
    over->count = 0;
    dray__tree_free(over);
    return rc;
}

dray__node *dray__tree_find(dray__node *root, const char *path)
{
    dray__node *at = root;
    while (at && *path) {
        const char *dot = strchrnul(path, '.');
        char key[64];
        if ((size_t)(dot - path) >= sizeof(key))
            return NULL;
        memcpy(key, path, (size_t)(dot - path));
        key[dot - path] = 0;
        at = at->kind == DRAY__NODE_MAPPING ? dray__tree_child(at, key) : NULL;
        path = *dot ? dot + 1 : dot;
    }
    return at;
}

int dray__tree_assign(dray__node *scalar, const char *value, dray_error *error)
{
    char *copy = strdup(value);
    if (!copy)
        return dray__nomem(error);
    free(scalar->value);
    scalar->value = copy;
    return DRAY_OK;
}

/* ---- writing --------------------------------------------------------------------------------- */

static void put_text(dray__writer *out, const char *text)
{
    dray__put_bytes(out, text, strlen(text));
}

static void put_indent(dray__writer *out, int depth)
{
    for (int i = 0; i < depth; i++)
        put_text(out, "  ");
}

static bool is_plain(const char *text)
{
    if (!isalnum((unsigned char)text[0]) && text[0] != '/' && text[0] != '.' && text[0] != '-')
        return false;
    if (text[0] == '-' && !isdigit((unsigned char)text[1]))
        return false;
    for (const char *c = text; *c; c++)
        if (!isalnum((unsigned char)*c) && !strchr("_./+-", *c))
            return false;
    return true;
}

/* A character behind ASCII that YAML takes as a line break or refuses as it is: its number, and its
 * bytes. 0: an ordinary one. */
static unsigned special(const char *text, int *bytes)
{
    const unsigned char *c = (const unsigned char *)text;
    *bytes = c[0] == 0xc2 ? 2 : 3;
    if (c[0] == 0xc2 && c[1] < 0xa0) /* control characters, and the next line among them */
        return c[1];
    if (c[0] == 0xe2 && c[1] == 0x80 && (c[2] & 0xfe) == 0xa8) /* line and paragraph separators */
        return 0x2000u | (c[2] & 0x7f);
    if (c[0] == 0xef && c[1] == 0xbb && c[2] == 0xbf) /* byte order mark */
        return 0xfeff;
    return c[0] == 0xef && c[1] == 0xbf && c[2] >= 0xbe ? 0xff00u | (c[2] + 0x40u) : 0;
}

/* Quoted text is written with JSON's escapes, which YAML's double quotes share. */
static void put_scalar(dray__writer *out, const char *text)
{
    if (is_plain(text)) {
        put_text(out, text);
        return;
    }
    put_text(out, "\"");
    for (const char *c = text; *c; c++) {
        char escape[8];
        int bytes;
        unsigned code = special(c, &bytes);
        if (*c == '"' || *c == '\\')
            snprintf(escape, sizeof(escape), "\\%c", *c);
        else if ((unsigned char)*c < 0x20 || *c == 0x7f)
            snprintf(escape, sizeof(escape), "\\x%02x", (unsigned)*c);
        else if (code)
            snprintf(escape, sizeof(escape), "\\u%04x", code);
        else
            snprintf(escape, sizeof(escape), "%c", *c);
        put_text(out, escape);
        c += code ? bytes - 1 : 0;
    }
    put_text(out, "\"");
}

static bool is_flat(const dray__node *node)
{
    for (uint32_t i = 0; i < node->count; i++)
        if (node->children[i]->kind != DRAY__NODE_SCALAR)
            return false;
    return true;
}

static void put_flat(dray__writer *out, const dray__node *node)
{
    bool mapping = node->kind == DRAY__NODE_MAPPING;
    put_text(out, mapping ? "{" : "[");
    for (uint32_t i = 0; i < node->count; i++) {
        put_text(out, i ? ", " : "");
        if (mapping) {
            put_scalar(out, node->children[i]->key);
            put_text(out, ": ");
        }
        put_scalar(out, node->children[i]->value);
    }
    put_text(out, mapping ? "}" : "]");
}

static void put_children(dray__writer *out, const dray__node *node, int depth, bool first_inline);

static void put_value(dray__writer *out, const dray__node *node, int depth)
{
    if (node->kind == DRAY__NODE_SCALAR) {
        put_text(out, " ");
        put_scalar(out, node->value);
        put_text(out, "\n");
    } else if (!node->count || (node->kind == DRAY__NODE_SEQUENCE && is_flat(node))) {
        put_text(out, " ");
        put_flat(out, node);
        put_text(out, "\n");
    } else {
        put_text(out, "\n");
        put_children(out, node, depth + 1, false);
    }
}

/* first_inline: the first line stands behind "- " already. */
static void put_children(dray__writer *out, const dray__node *node, int depth, bool first_inline)
{
    for (uint32_t i = 0; i < node->count; i++) {
        const dray__node *child = node->children[i];
        if (i || !first_inline)
            put_indent(out, depth);
        if (node->kind == DRAY__NODE_MAPPING) {
            put_scalar(out, child->key);
            put_text(out, ":");
            put_value(out, child, depth);
        } else if (child->kind == DRAY__NODE_MAPPING && child->count) {
            put_text(out, "- ");
            put_children(out, child, depth + 1, true);
        } else {
            put_text(out, "-");
            put_value(out, child, depth);
        }
    }
}

void dray__tree_emit(const dray__node *root, dray__writer *out)
{
    if (root->count)
        put_children(out, root, 0, false);
    else
        put_text(out, "{}\n");
}

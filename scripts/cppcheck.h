/* Read by cppcheck alone, before every file: jansson's loops in short, since it is not given the
 * headers of libraries. */
#define json_array_foreach(array, i, value) for (i = 0; (value = json_array_get(array, i)); i++)
#define json_object_foreach(object, key, value)                                                    \
    for (key = first_key(object); (value = json_object_get(object, key)); key = next_key(object))

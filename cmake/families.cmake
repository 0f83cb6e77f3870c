# cmake -DOUT=x.json -DFILES="a.json;b.json" -P families.cmake: one JSON object of the files' contents, by name.
set(text "")
foreach(file IN LISTS FILES)
  get_filename_component(name "${file}" NAME_WE)
  file(READ "${file}" contents)
  string(APPEND text ",\n\"${name}\": ${contents}")
endforeach()
string(SUBSTRING "${text}" 1 -1 text)
file(WRITE "${OUT}" "{${text}}\n")

# bash completion for llmcli, which says itself what completes a line; works in bash 3.2
_llmcli() {
    local line kind=""
    COMPREPLY=()
    while IFS= read -r line; do
        if [[ -z $kind ]]; then kind=$line; else COMPREPLY+=("$line"); fi
    done < <("${1/#\~/$HOME}" _complete bash "${COMP_WORDS[@]:0:COMP_CWORD+1}" 2>/dev/null)
    case $kind in
    files) compopt -o filenames 2>/dev/null ;;
    part) compopt -o nospace 2>/dev/null ;;
    esac
}
complete -F _llmcli llmcli

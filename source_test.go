package edgelimit

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/printer"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// One file reads identity headers: resolver.go. Whoever needs to know who the
// client is asks it. These tests hold for the product's own source, and fail with
// the place where it is otherwise.

// sourceIdentity are the names that only resolver.go may spell out. The list is
// longer than what is removed from requests: a name that is read somewhere is
// wrong whether upstreams know it or not.
var sourceIdentity = []string{
	"X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Forwarded-By", "Forwarded", "X-Forwarded", "Forwarded-For",
	"X-Real-IP", "X-Client-IP", "Client-IP", "X-Cluster-Client-IP", "X-Original-Forwarded-For", "X-Originating-IP",
	"X-Remote-IP", "X-Remote-Addr", "Remote-Addr", "True-Client-IP", "CF-Connecting-IP", "CF-Connecting-IPv6", "CF-Pseudo-IPv4",
	"Fastly-Client-IP", "Fly-Client-IP", "X-Envoy-External-Address", "X-Azure-ClientIP", "X-Azure-SocketIP",
	"X-Appengine-User-IP", "X-Vercel-Forwarded-For", "X-NF-Client-Connection-IP", "CloudFront-Viewer-Address",
	"WL-Proxy-Client-IP", "Proxy-Client-IP", "X-ProxyUser-IP", "Ali-CDN-Real-IP", "X-Akamai-Client-IP", "DO-Connecting-IP",
}

// identityReaders are the files that may spell out such names, and read them.
var identityReaders = []string{"resolver.go"}

// dynamicReads are the places that look at request headers whose names are not
// in the source, each with the reason why that reads no identity.
var dynamicReads = map[string]string{
	"admin.go serveResolve: client.setLines(request.Header, query[\"header\"])": "writes the chain that is asked about into a request that is made up for it",
	"forward.go remove: range r.Header":                                         "all names are looked at to find those to delete; no value is read",
	"forward.go remove: unname(r.Header, connection, names)":                    "rewrites the header Connection, which is read by name",
	"forward.go removeTrailers: range r.Trailer":                                "all names are looked at to find those to delete; no value is read",
	"key.go evaluate: repl.Get(piece.text)":                                     "the operator's key: who writes such a value is judged when the configuration is loaded",
}

// constantReads are headers that other files may read by name: not identity, and
// each with its use.
var constantReads = map[string]string{
	"Connection": "its tokens can have identity headers removed on the way",
	"Accept":     "in what form to answer",
}

// sourceFile is one file of the product.
type sourceFile struct {
	path   string
	fset   *token.FileSet
	syntax *ast.File
}

func parseSource(t *testing.T) (files []sourceFile) {
	t.Helper()
	var paths []string
	for _, root := range []string{".", "redisstore", "internal", "xcaddy"} {
		err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
			switch {
			case err != nil && path == root && root == "redisstore":
				return fs.SkipDir // not there
			case err != nil:
				return err
			case entry.IsDir() && root == "." && path != root:
				return fs.SkipDir
			case !entry.IsDir() && strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go"):
				paths = append(paths, filepath.ToSlash(path))
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range paths {
		fset := token.NewFileSet()
		syntax, err := parser.ParseFile(fset, path, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, sourceFile{path, fset, syntax})
	}
	return files
}

func isIdentityName(text string) bool {
	return slices.ContainsFunc(sourceIdentity, func(name string) bool { return sameForCGI(name, text) })
}

// namesIdentity says whether a string in the source names an identity header: as
// a whole, or in a placeholder.
func namesIdentity(text string) bool {
	if isIdentityName(text) {
		return true
	}
	lower := strings.ToLower(text)
	for _, opening := range []string{"request.header.", "{header."} {
		for rest := lower; ; {
			_, after, found := strings.Cut(rest, opening)
			if !found {
				break
			}
			end := strings.IndexFunc(after, func(r rune) bool { return r != '-' && r != '_' && (r < 'a' || 'z' < r) && (r < '0' || '9' < r) })
			if end < 0 {
				end = len(after)
			}
			if isIdentityName(after[:end]) {
				return true
			}
			rest = after
		}
	}
	return false
}

// stringsOf collects the string constants of all files by name, and whether a
// name is one.
func stringsOf(files []sourceFile) map[string]string {
	constants := make(map[string]string)
	for _, file := range files {
		for _, declaration := range file.syntax.Decls {
			general, ok := declaration.(*ast.GenDecl)
			if !ok || general.Tok != token.CONST {
				continue
			}
			for _, spec := range general.Specs {
				value := spec.(*ast.ValueSpec)
				for i, name := range value.Names {
					if i < len(value.Values) {
						if text, ok := literalText(value.Values[i]); ok {
							constants[name.Name] = text
						}
					}
				}
			}
		}
	}
	return constants
}

func literalText(e ast.Expr) (string, bool) {
	literal, ok := e.(*ast.BasicLit)
	if !ok || literal.Kind != token.STRING {
		return "", false
	}
	text, err := strconv.Unquote(literal.Value)
	return text, err == nil
}

// headerUse is a place where a request's header is looked at.
type headerUse struct {
	file     string
	function string
	position token.Position
	text     string // the expression
	name     string // of the header, if it is a constant
	constant bool
}

// headerUses finds all reads of request headers and trailers in a file, and all
// ways by which such a header gets out of sight: to another function or another
// variable. Assignments to one name and delete are not reads.
func headerUses(file sourceFile, constants map[string]string) (uses []headerUse) {
	for _, declaration := range file.syntax.Decls {
		function, ok := declaration.(*ast.FuncDecl)
		if !ok || function.Body == nil {
			continue
		}
		finder := headerFinder{file: file, function: function.Name.Name, constants: constants,
			requests: make(map[string]bool), headers: make(map[string]bool), replacers: map[string]bool{"repl": true, "replacer": true}}
		ast.Inspect(function, func(n ast.Node) bool {
			if signature, ok := n.(*ast.FuncType); ok {
				finder.parameters(signature) // of function literals too
			}
			return true
		})
		finder.locals(function.Body)
		finder.inspect(function.Body)
		uses = append(uses, finder.uses...)
	}
	return uses
}

// headerFinder knows, within one function, which names are requests and which
// are their headers.
type headerFinder struct {
	file      sourceFile
	function  string
	constants map[string]string
	requests  map[string]bool
	headers   map[string]bool
	replacers map[string]bool
	uses      []headerUse
	seen      map[ast.Node]bool
}

func (f *headerFinder) print(n ast.Node) string {
	var text bytes.Buffer
	_ = printer.Fprint(&text, f.file.fset, n)
	return strings.Join(strings.Fields(text.String()), " ")
}

func (f *headerFinder) parameters(signature *ast.FuncType) {
	for _, field := range signature.Params.List {
		kind := f.print(field.Type)
		for _, name := range field.Names {
			switch kind {
			case "*http.Request", "http.Request":
				f.requests[name.Name] = true
			case "http.Header", "textproto.MIMEHeader", "map[string][]string":
				f.headers[name.Name] = true
			case "*caddy.Replacer":
				f.replacers[name.Name] = true
			}
		}
	}
}

// locals follows headers and requests into variables.
func (f *headerFinder) locals(body *ast.BlockStmt) {
	ast.Inspect(body, func(n ast.Node) bool {
		assignment, ok := n.(*ast.AssignStmt)
		if !ok || len(assignment.Lhs) != len(assignment.Rhs) {
			return true
		}
		for i, right := range assignment.Rhs {
			if name, ok := assignment.Lhs[i].(*ast.Ident); ok {
				if f.isHeader(right) {
					f.headers[name.Name] = true
				}
				if text := f.print(right); f.requests[text] || strings.Contains(text, ".WithContext(") || strings.Contains(text, "http.NewRequest") || strings.Contains(text, "&http.Request{") {
					f.requests[name.Name] = true
				}
			}
		}
		return true
	})
}

// isHeader says whether e is a request's header or trailer, or a copy of one.
func (f *headerFinder) isHeader(e ast.Expr) bool {
	switch e := e.(type) {
	case *ast.ParenExpr:
		return f.isHeader(e.X)
	case *ast.Ident:
		return f.headers[e.Name]
	case *ast.SelectorExpr:
		if e.Sel.Name != "Header" && e.Sel.Name != "Trailer" {
			return false
		}
		return f.isRequest(e.X)
	case *ast.CallExpr:
		if selector, ok := e.Fun.(*ast.SelectorExpr); ok && selector.Sel.Name == "Clone" {
			return f.isHeader(selector.X)
		}
		return len(e.Args) == 1 && slices.Contains([]string{"http.Header", "textproto.MIMEHeader", "maps.Clone"}, f.print(e.Fun)) && f.isHeader(e.Args[0])
	}
	return false
}

// isRequest says whether e is a request. A field of any name that begins with
// r or ends in request counts as one: better to have to allow it below.
func (f *headerFinder) isRequest(e ast.Expr) bool {
	switch e := e.(type) {
	case *ast.Ident:
		return f.requests[e.Name]
	case *ast.SelectorExpr:
		name := strings.ToLower(e.Sel.Name)
		return name == "r" || name == "req" || strings.HasSuffix(name, "request")
	case *ast.CallExpr:
		selector, ok := e.Fun.(*ast.SelectorExpr)
		return ok && (selector.Sel.Name == "WithContext" || selector.Sel.Name == "Clone") && f.isRequest(selector.X)
	case *ast.StarExpr:
		return f.isRequest(e.X)
	}
	return false
}

func (f *headerFinder) use(n ast.Node, text string, name ast.Expr) {
	u := headerUse{file: f.file.path, function: f.function, position: f.file.fset.Position(n.Pos()), text: text}
	if name != nil {
		if literal, ok := literalText(name); ok {
			u.name, u.constant = literal, true
		} else if identifier, ok := name.(*ast.Ident); ok {
			u.name, u.constant = f.constants[identifier.Name], f.constants[identifier.Name] != ""
		}
	}
	f.uses = append(f.uses, u)
}

func (f *headerFinder) inspect(body *ast.BlockStmt) {
	handled := make(map[ast.Node]bool)
	ast.Inspect(body, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.AssignStmt:
			for i, left := range n.Lhs {
				if index, ok := left.(*ast.IndexExpr); ok && f.isHeader(index.X) {
					handled[index], handled[index.X] = true, true // a write
				} else if f.isHeader(left) {
					handled[left] = true // a header is set as a whole
				}
				if len(n.Lhs) == len(n.Rhs) && f.isHeader(n.Rhs[i]) {
					if _, ok := left.(*ast.Ident); ok {
						handled[n.Rhs[i]] = true // followed by locals
					}
				}
			}
		case *ast.BinaryExpr:
			if f.print(n.Y) == "nil" && f.isHeader(n.X) {
				handled[n.X] = true // whether there is one at all
			}
		case *ast.RangeStmt:
			if f.isHeader(n.X) {
				f.use(n, "range "+f.print(n.X), nil)
				handled[n.X] = true
			}
		case *ast.IndexExpr:
			if f.isHeader(n.X) {
				if !handled[n] {
					f.use(n, f.print(n), n.Index)
				}
				handled[n.X] = true
			}
		case *ast.CallExpr:
			f.call(n, handled)
		case *ast.SelectorExpr:
			if f.isHeader(n) && !handled[n] {
				f.use(n, f.print(n), nil) // out of sight
			}
			return !f.isHeader(n)
		case *ast.KeyValueExpr:
			if identifier, ok := n.Key.(*ast.Ident); ok {
				handled[identifier] = true
			}
		case *ast.Ident:
			if f.headers[n.Name] && !handled[n] {
				f.use(n, n.Name, nil) // out of sight
			}
		}
		return true
	})
}

// call looks at a call in which a header takes part.
func (f *headerFinder) call(n *ast.CallExpr, handled map[ast.Node]bool) {
	if selector, ok := n.Fun.(*ast.SelectorExpr); ok {
		handled[selector.Sel] = true
		switch {
		case f.isHeader(selector.X):
			handled[selector.X] = true
			switch selector.Sel.Name {
			case "Get", "Values":
				f.use(n, f.print(n), n.Args[0])
			case "Set", "Add", "Del":
			case "Clone":
				if !handled[n] {
					f.use(n, f.print(n), nil) // out of sight
				}
			default:
				f.use(n, f.print(n), nil)
			}
		case (selector.Sel.Name == "Get" || selector.Sel.Name == "GetString") && f.replacers[f.print(selector.X)]:
			if _, constant := literalText(n.Args[0]); !constant {
				f.use(n, f.print(n), nil)
			}
		}
	}
	if identifier, ok := n.Fun.(*ast.Ident); ok && (identifier.Name == "delete" || identifier.Name == "len" || identifier.Name == "clear") {
		handled[n.Args[0]] = true
		return
	}
	for _, argument := range n.Args {
		if f.isHeader(argument) {
			f.use(n, f.print(n), nil)
			handled[argument] = true
		}
	}
}

// Names of identity headers stand in resolver.go. Others that have to write one
// use its constants.
func TestIdentityHeadersAreNamedInOneFile(t *testing.T) {
	named := false
	for _, file := range parseSource(t) {
		reader := slices.Contains(identityReaders, file.path)
		ast.Inspect(file.syntax, func(n ast.Node) bool {
			if _, ok := n.(*ast.ImportSpec); ok {
				return false
			}
			if field, ok := n.(*ast.Field); ok && field.Tag != nil {
				return true
			}
			e, ok := n.(ast.Expr)
			if !ok {
				return true
			}
			if text, ok := literalText(e); ok && namesIdentity(text) {
				named = named || reader
				if !reader {
					t.Errorf("%s: %q: only %s may name identity headers", file.fset.Position(n.Pos()), text, identityReaders)
				}
			}
			return true
		})
	}
	if !named {
		t.Errorf("%s names no identity header: has the resolver moved?", identityReaders)
	}
}

// Request headers are read by names that stand in the source, or at a place that
// is allowed here with its reason.
func TestHeadersAreReadByName(t *testing.T) {
	files := parseSource(t)
	constants := stringsOf(files)
	used := make(map[string]bool)
	reads := 0
	for _, file := range files {
		for _, use := range headerUses(file, constants) {
			reads++
			place := use.file + " " + use.function + ": " + use.text
			switch {
			case slices.Contains(identityReaders, use.file):
			case use.constant && isIdentityName(use.name):
				t.Errorf("%s: %s reads %s: ask the resolver who the client is", use.position, use.text, use.name)
			case use.constant:
				if constantReads[use.name] == "" {
					t.Errorf("%s: %s reads the header %s, which constantReads does not allow", use.position, use.text, use.name)
				}
				used[use.name] = true
			case dynamicReads[place] == "":
				t.Errorf("%s: %q reads a header whose name is not in the source: name it, or allow it in dynamicReads with the reason why it is no identity", use.position, place)
			default:
				used[place] = true
			}
		}
	}
	for place := range dynamicReads {
		if !used[place] {
			t.Errorf("dynamicReads allows %q, which is not in the source any more", place)
		}
	}
	for name := range constantReads {
		if !used[name] {
			t.Errorf("constantReads allows %s, which is not read any more", name)
		}
	}
	if reads < 5 {
		t.Errorf("only %d reads of headers were found: are they still recognised?", reads)
	}
}

// The finder finds what it is there to find.
func TestHeaderFinder(t *testing.T) {
	const source = `package p
const known = "X-Known"
func f(w http.ResponseWriter, r *http.Request, h http.Header, repl *caddy.Replacer, name string) {
	%s
}
func (s *state) g() { %s }`
	for _, test := range []struct {
		why   string
		line  string
		reads []string // the expressions; a constant name behind =
	}{
		{"a literal", `_ = r.Header["Accept"]`, []string{`r.Header["Accept"]=Accept`}},
		{"a constant", `_ = r.Header[known]`, []string{"r.Header[known]=X-Known"}},
		{"a variable", `_ = r.Header[name]`, []string{"r.Header[name]="}},
		{"an expression", `_ = r.Header["X-"+name]`, []string{`r.Header["X-"+name]=`}},
		{"Get", `_ = r.Header.Get("Accept")`, []string{`r.Header.Get("Accept")=Accept`}},
		{"Get of a variable", `_ = r.Header.Get(name)`, []string{"r.Header.Get(name)="}},
		{"Values", `_ = r.Header.Values(name)`, []string{"r.Header.Values(name)="}},
		{"a loop", `for k := range r.Header { _ = k }`, []string{"range r.Header="}},
		{"a trailer", `_ = r.Trailer.Get(name)`, []string{"r.Trailer.Get(name)="}},
		{"a parameter", `_ = h.Get(name)`, []string{"h.Get(name)="}},
		{"a parameter, by index", `_ = h[name]`, []string{"h[name]="}},
		{"a loop over a parameter", `for k := range h { _ = k }`, []string{"range h="}},
		{"a variable that holds a header", `x := r.Header; _ = x[name]`, []string{"x[name]="}},
		{"a copy", `x := r.Header.Clone(); _ = x.Get(name)`, []string{"x.Get(name)="}},
		{"another request", `q := r.WithContext(nil); _ = q.Header[name]`, []string{"q.Header[name]="}},
		{"the request in a field", `_ = s.request.Header[name]`, []string{"s.request.Header[name]="}},
		{"in a function of its own", `func(q *http.Request) { _ = q.Header[name] }(r)`, []string{"q.Header[name]="}},
		{"another function gets it", `other(r.Header)`, []string{"other(r.Header)="}},
		{"and another one's keys", `_ = maps.Keys(r.Header)`, []string{"maps.Keys(r.Header)="}},
		{"it is returned", `return r.Header`, []string{"r.Header="}},
		{"it is written somewhere", `_ = r.Header.Write(w)`, []string{"r.Header.Write(w)="}},
		{"in an if", `if v, ok := r.Header[name]; ok { _ = v }`, []string{"r.Header[name]="}},
		{"by a placeholder", `_, _ = repl.Get("http.request.header." + name)`, []string{`repl.Get("http.request.header." + name)=`}},
		{"written", `r.Header[name] = nil`, nil},
		{"set", `r.Header.Set(name, name)`, nil},
		{"deleted", `delete(r.Header, name)`, nil},
		{"whether there is one", `if r.Trailer != nil { return }`, nil},
		{"a response's", `_ = w.Header().Get(name)`, nil},
		{"a field of that name in something else", `_ = config.Header`, nil},
		{"a placeholder that is named", `_, _ = repl.Get("http.request.host")`, nil},
	} {
		text := strings.Replace(source, "%s", test.line, 1)
		text = strings.Replace(text, "%s", "", 1)
		fset := token.NewFileSet()
		syntax, err := parser.ParseFile(fset, "f.go", text, parser.SkipObjectResolution)
		if err != nil {
			t.Errorf("%s: %v", test.why, err)
			continue
		}
		file := sourceFile{"f.go", fset, syntax}
		var reads []string
		for _, use := range headerUses(file, stringsOf([]sourceFile{file})) {
			reads = append(reads, use.text+"="+use.name)
		}
		if !slices.Equal(reads, test.reads) {
			t.Errorf("%s: %s: found %q, want %q", test.why, test.line, reads, test.reads)
		}
	}
	for _, text := range []string{"X-Forwarded-For", "x-real-ip", "HTTP.REQUEST.HEADER.X-Forwarded-For", "{http.request.header.CF-Connecting-IP}", "{header.forwarded}", "a {header.X} {header.X-Real-IP}"} {
		if !namesIdentity(text) {
			t.Errorf("%q is not found to name an identity header", text)
		}
	}
	for _, text := range []string{"", "forward", "X-Forwarded-For is no name alone", "{header.X-Api-Key}", "http.request.header."} {
		if namesIdentity(text) {
			t.Errorf("%q is found to name an identity header", text)
		}
	}
}

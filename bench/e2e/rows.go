package main

// The servers that are compared. Each is asked for the same short answer.

const (
	endlessLimit   = "limit many 1000000/s {\n burst 1000000000000000\n}\n"
	endlessCeiling = "ceiling all 10000000000/1h\n"
	denyingLimit   = "limit few 1/1d\n"
)

var (
	bare    = serverKind{name: "bare Caddy: respond", program: "bare", config: "respond ok", status: "200"}
	bare429 = serverKind{name: "bare Caddy: respond 429", program: "bare", config: "respond 429", status: "429"}

	bareAnswer = serverKind{name: "bare Caddy: the answer of a denial", program: "bare", status: "429",
		config: "header Retry-After 86400\nrespond 429"}

	nothing = serverKind{name: "a handler that only calls next", program: "nothing", config: "nothing\nrespond ok", status: "200"}
	allowed = serverKind{name: "all allowed", program: "ours", status: "200",
		config: "edge_limit {\n" + endlessLimit + endlessCeiling + "}\nrespond ok"}
	denied = serverKind{name: "all denied, no error routes", program: "ours", status: "429",
		config: "edge_limit {\n" + denyingLimit + endlessCeiling + "}\nrespond ok"}
	deniedRouted = serverKind{name: "all denied, with handle_errors", program: "ours", status: "429",
		config: "edge_limit {\n" + denyingLimit + endlessCeiling + "}\nrespond ok\nhandle_errors {\n respond 429\n}"}
	errorRouted = serverKind{name: "bare Caddy: error 429 and handle_errors", program: "bare", status: "429",
		config: "error 429\nhandle_errors {\n respond 429\n}"}

	nginxBare    = serverKind{name: "bare nginx", program: "nginx", config: "empty_gif;", status: "200"}
	nginxAllowed = serverKind{name: "nginx limit_req, all allowed", program: "nginx", status: "200",
		options: "limit_req_zone $binary_remote_addr zone=many:10m rate=1000000r/s;",
		config:  "limit_req zone=many burst=1000000 nodelay; empty_gif;"}
	nginxDenied = serverKind{name: "nginx limit_req, all denied", program: "nginx", status: "429",
		options: "limit_req_zone $binary_remote_addr zone=few:10m rate=1r/m; limit_req_status 429; limit_req_log_level info;",
		config:  "limit_req zone=few; empty_gif;"}
	nginxDeniedLogged = serverKind{name: "nginx limit_req, all denied, with its log line", program: "nginx", status: "429",
		options: "limit_req_zone $binary_remote_addr zone=few:10m rate=1r/m; limit_req_status 429;",
		config:  "limit_req zone=few; empty_gif;"}
)

// row compares one server with another, and says what is to be reached.
type row struct {
	server  serverKind
	against serverKind
	atLeast float64 // of the other's throughput; 0: nothing is asked for
	floor   string  // the name of what costs that much without any limiter
}

var rows = []row{
	{server: bare, against: bare},
	{server: nothing, against: bare},
	{server: allowed, against: bare, atLeast: 0.96, floor: nothing.name},
	{server: bare429, against: bare429},
	{server: bareAnswer, against: bare429},
	{server: denied, against: bare429, atLeast: 0.95, floor: bareAnswer.name},
	{server: errorRouted, against: bare429},
	{server: deniedRouted, against: bare429, atLeast: 0.80, floor: errorRouted.name},
	{server: nginxBare, against: nginxBare},
	{server: nginxAllowed, against: nginxBare},
	{server: nginxDenied, against: nginxBare},
	{server: nginxDeniedLogged, against: nginxBare},
}

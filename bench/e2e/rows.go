package main

// The servers that are compared. Each is asked for the same short answer.

const (
	endlessLimit   = "limit many 1000000/s {\n burst 1000000000000000\n}\n"
	endlessCeiling = "ceiling all 10000000000/1h\n"
	denyingLimit   = "limit few 1/1d\n"

	// what the flood has too, but for the size of its table
	lastingLimit = "limit each 10/1d\n"
	trustLoad    = "client {\ntrusted_proxies static 127.0.0.1/32\n}\n"
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

	// What an allowed request costs, step by step from bare Caddy to the flood: the
	// load generator is a trusted proxy in front of these.
	bareBehind     = serverKind{name: "bare Caddy behind a proxy", program: "bare", config: "respond ok", status: "200", request: oneClient}
	resolvedBehind = serverKind{name: "behind a proxy, no limit", program: "ours", status: "200",
		options: "edge_limit {\n" + trustLoad + "}\n", config: "edge_limit\nrespond ok", request: oneClient}
	allowedBehind = serverKind{name: "behind a proxy, all allowed, one client", program: "ours", status: "200",
		options: "edge_limit {\n" + trustLoad + "}\n", config: "edge_limit {\n" + endlessLimit + endlessCeiling + "}\nrespond ok", request: oneClient}
	freshBehind = serverKind{name: "behind a proxy, fresh clients, a table of 1000", program: "ours", status: "200",
		options: "edge_limit {\nmax_keys 1000\n" + trustLoad + "}\n", config: "edge_limit {\n" + lastingLimit + endlessCeiling + "}\nrespond ok",
		request: func() func() []byte { return freshClients(requestHead) }}

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

func directClient() func() []byte { return sameRequest(requestHead + "\r\n") }
func oneClient() func() []byte {
	return sameRequest(requestHead + "X-Forwarded-For: 192.0.2.1\r\n\r\n")
}

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
	{server: bareBehind, against: bareBehind},
	{server: resolvedBehind, against: bareBehind},
	{server: allowedBehind, against: bareBehind},
	{server: freshBehind, against: bareBehind},
	{server: nginxBare, against: nginxBare},
	{server: nginxAllowed, against: nginxBare},
	{server: nginxDenied, against: nginxBare},
	{server: nginxDeniedLogged, against: nginxBare},
}
